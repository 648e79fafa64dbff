// saved_options.h: the options of a run in OUTPUT/run.json, which --resume takes over (parse_options in options.h).
#pragma once
#include <string>

#include "options/options.h"

// Reads the options in OUTPUT/run.json, as options_json wrote them at the last start of the run. Returns "" if there is
// no such file and the options on the command line are sufficient.
std::string saved_options(const Options& options);

// The options in the text of run.json, a JSON object; `path` is its name in errors (EXIT_BAD_DATA). Relative paths
// become absolute if the run was started in another directory.
std::string parse_run_json(const std::string& text, const std::string& path, const Options& options);
