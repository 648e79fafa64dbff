#!/usr/bin/env bash
# from_help.sh man PROGRAM VERSION | bash PROGRAM NAME... | zsh PROGRAM NAME...: prints a man page, or the shell's
# completion of options for the programs NAME, made from PROGRAM's --help. make install calls it.
set -euo pipefail
what=$1 program=$2
shift 2
commands=(train generate eval plan tokenize export)

help_of() { "$program" "$1" --help; }

# options_of COMMAND: its options, one per line: long name, unit, help, between tabs.
options_of() {
    help_of "$1" | awk '
        function flush() { if (name != "") print name "\t" unit "\t" text; name = "" }
        /^  -/ {
            flush()
            name = $1; sub(/.*,/, "", name); sub(/\[=.*/, "", name)
            rest = substr($0, 3); unit = ""; text = ""
            if (match(rest, /  +/)) { text = substr(rest, RSTART + RLENGTH); rest = substr(rest, 1, RSTART - 1) }
            if (split(rest, word, " ") > 1) unit = word[2]
            next }
        /^ +[^ ]/ { if (name != "") { sub(/^ +/, ""); text = text (text == "" ? "" : " ") $0 } next }
        { flush() }
        END { flush() }'
}

man_page() {
    local command
    printf '.TH TRAIN_GPT2 1 "" "train_gpt2 %s"\n' "$1"
    printf '.SH NAME\ntrain_gpt2 \\- a standalone GPT-2 trainer\n.SH SYNOPSIS\n'
    for command in "${commands[@]}"; do printf '.B train_gpt2 %s\n[options]\n.br\n' "$command"; done
    printf '.SH DESCRIPTION\nTokenizes text, trains GPT-2 models, evaluates them and generates text.\n'
    printf '.SH OPTIONS OF EVERY COMMAND\n.TP\n.B \\-\\-help\nthe list of options\n.TP\n.B \\-\\-version\nthe version\n'
    for command in "${commands[@]}"; do
        printf '.SH OPTIONS OF %s\n' "${command^^}"
        options_of "$command" | sed 's/\\/\\\\/g; s/-/\\-/g' |
            awk -F'\t' '{ printf ".TP\n.B %s%s\n%s\n", $1, $2 == "" ? "" : " " $2, $3 == "" ? "\\&" : "\\&" $3 }'
    done
}

# Values such as fp32|bf16|auto are completed from the list, other values as files.
bash_completion() {
    local command
    echo "_train_gpt2() {"
    echo '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}'
    echo '    local command=train options="" values=""'
    echo "    case \" ${commands[*]} \" in *\" \${COMP_WORDS[1]:-} \"*) command=\${COMP_WORDS[1]} ;; esac"
    echo '    case $command in'
    for command in "${commands[@]}"; do
        printf '        %s) options="%s" ;;\n' "$command" "$(options_of "$command" | cut -f1 | tr '\n' ' ')--help"
    done
    echo '    esac'
    echo '    case $command:$before in'
    for command in "${commands[@]}"; do
        options_of "$command" | awk -F'\t' -v command="$command" '$2 ~ /^[a-z0-9|-]+$/ && $2 ~ /\|/ {
            gsub(/\|/, " ", $2); printf "        %s:%s) values=\"%s\" ;;\n", command, $1, $2 }'
    done
    echo '    esac'
    echo '    if [ -n "$values" ]; then mapfile -t COMPREPLY < <(compgen -W "$values" -- "$word")'
    echo '    elif [[ $word == -* ]]; then mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")'
    echo "    elif [ \"\$COMP_CWORD\" = 1 ]; then mapfile -t COMPREPLY < <(compgen -W \"${commands[*]}\" -- \"\$word\")"
    echo '    else mapfile -t COMPREPLY < <(compgen -f -- "$word"); fi'
    echo "}"
    echo "complete -o filenames -F _train_gpt2 $*"
}

zsh_completion() {
    local command
    echo "#compdef $*"
    echo '_arguments_of() {'
    echo '    case $1 in'
    for command in "${commands[@]}"; do
        printf '        %s) _arguments -S \\\n' "$command"
        options_of "$command" | sed "s/'/'\\\\''/g; s/[]:[]/\\\\&/g" | awk -F'\t' '{
            value = $2 == "" ? "" : ":" $2 ":_files"
            choices = $2
            if ($2 ~ /^[a-z0-9|-]+$/ && gsub(/\|/, " ", choices)) value = ":value:(" choices ")"
            printf "            '\''%s[%s]%s'\'' \\\n", $1, $3, value }'
        echo "            '*:file:_files' ;;"
    done
    echo '    esac'
    echo '}'
    echo "if (( CURRENT > 2 )) && [[ \" ${commands[*]} \" == *\" \$words[2] \"* ]]; then"
    echo '    _arguments_of $words[2]'
    echo "elif (( CURRENT == 2 )) && [[ \$words[2] != -* ]]; then"
    echo "    compadd ${commands[*]}"
    echo 'else'
    echo '    _arguments_of train'
    echo 'fi'
}

case $what in
    man) man_page "$@" ;;
    bash) bash_completion "$@" ;;
    zsh) zsh_completion "$@" ;;
esac
