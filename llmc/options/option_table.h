// option_table.h: declares every option, section by section. options.h describes the fields that they set.
#pragma once
#include "options/arguments.h"
#include "options/options.h"

// The options of a command, in the order of --help. They refer to the fields of `options`.
OptionSpecs declare(Command command, Options& options);
