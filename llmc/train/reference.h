// reference.h: the curve of another run, with which a run compares its validation losses.
//
// A curve is in the form of log.jsonl. Its lines of kind val count. Its first line has name, source, and match: the
// fields that the first line of a run's log must have, too. The files of data/curves are part of the program.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

struct Reference {
    std::string name, source;          // no name: there is no curve
    std::map<int64_t, double> losses;  // step, validation loss

    // The loss of the curve at this step, between two points linear in the logarithm of the step. There is none after
    // the last point, nor between step 0 and the first point above it.
    std::optional<double> loss_at(int64_t step) const;
};

// Returns the curve of --reference: that of a log.jsonl or of a run's output directory, none for "none", or for "" the
// one of data/curves that matches `run`, the first line of a log. Refuses one without losses (EXIT_BAD_DATA).
Reference find_reference(const std::string& option, const nlohmann::json& run);
