#include "train/update_rule.h"

#include "base/common.h"

template <class floatX>
const UpdateRule<floatX>& find_update_rule(const std::string& name) {
    static const UpdateRule<floatX> table[] = {
        {"adamw", "AdamW", {"m", "v"}, "moments", adamw_update<floatX>},
    };
    std::string names;
    for (const UpdateRule<floatX>& rule : table) {
        if (rule.name == name) return rule;
        names += (names.empty() ? "" : ", ") + rule.name;
    }
    fail(EXIT_USAGE, "--optimizer %s is not known; give one of %s", name.c_str(), names.c_str());
}

template const UpdateRule<float>& find_update_rule(const std::string&);
template const UpdateRule<bf16>& find_update_rule(const std::string&);
