"""test_generate.py: what `generate` reads and prints: prompts, stop texts, and lines from a terminal."""

import os
import pty
import re
import shlex
import subprocess

import pytest
from harness import LIMIT, ONE, PROGRAM, Launch, environment, ranks, refused, run, text_of, words


def generated(trained, *options, tokens=range(60, 61)):
    """Returns what is printed after the prompt "the king", which must be so many tokens."""
    said = run(PROGRAM, "generate --prompt 'the king' --max-tokens 60 --seed 3 --init", trained.folder, *options)
    assert said.out.startswith("the king") and said.out.endswith("\n") and int(said.err.split()[0]) in tokens
    return said.out.removeprefix("the king")[:-1]


@pytest.fixture
def on_terminal(trained):
    """on_terminal(TYPED, OPTION...) generates with a terminal as stdin and stderr, on which these keys were typed."""
    def start(typed, *options):
        keyboard, terminal = pty.openpty()
        with os.fdopen(keyboard, "r+b", buffering=0) as keys, os.fdopen(terminal, "r+b", buffering=0) as screen:
            keys.write(typed.encode())
            command = words(PROGRAM, "generate --max-tokens 20 --seed 3 --init", trained.folder, *options)
            done = subprocess.run(command, stdin=screen, capture_output=True, timeout=LIMIT, env=environment())
        return done.returncode, text_of(done.stdout), text_of(done.stderr)

    return start


def test_a_stop_text_ends_the_text_before_it(trained):
    text = generated(trained)
    for stop in (text[9:11], text[20:29], text[-1], "the king"):  # the prompt is no new text
        others = ["--stop", "no such text", "--stop", text[40:45]]
        ends = [text.index(part) for part in (stop, text[40:45]) if part in text]
        assert generated(trained, ["--stop", stop], others, tokens=range(1, 50)) == text[:min(ends)]
    two = generated(trained, "--num-samples 2", ["--stop", text[20:29]], tokens=range(1, 110))
    assert two.startswith(text[:20] + "\n---\nthe king")


def test_a_repetition_penalty_makes_the_likeliest_text_another(trained):
    repeated, text = generated(trained, "--temperature 0"), generated(trained, "--temperature 0 --repetition-penalty 9")
    assert len(set(text.split())) > len(set(repeated.split()))


@pytest.mark.parametrize("content", ["the king", "the king\n", "the king\r\n"])
def test_a_prompt_file_is_the_prompt_without_a_newline_at_its_end(content, trained, tmp_path):
    (tmp_path / "prompt.txt").write_text(content)
    options = ["--max-tokens 9 --init", trained.folder]
    from_file = run(PROGRAM, "generate --prompt-file", tmp_path / "prompt.txt", *options)
    assert from_file.out == run(PROGRAM, "generate --prompt 'the king'", *options).out
    refused(65, "/dev/zero has more than 16,777,216 bytes", PROGRAM, "generate --prompt-file /dev/zero", *options)
    assert re.fullmatch(r"9 tokens in [0-9.]+ s: [0-9.]+ tokens/s\n", from_file.err)
    (tmp_path / "prompt.txt").write_text(content * 20)
    refused(2, "--prompt-file has ", PROGRAM, "generate --prompt-file", tmp_path / "prompt.txt", *options)
    refused(66, "no/such", PROGRAM, "generate --prompt-file no/such", *options)


ANY_BYTES = b"\t\r\x1b[2J\x01\xc2\x9b\xff\xc3\n\n"


def shell(script, *command, **keywords):
    """Runs a script of bash in which "$@" is the command and $0 a path."""
    return run(["bash", "-c", script], *command, **keywords)


def test_a_pipe_or_file_on_stdin_is_the_prompt_if_none_is_given(trained, tmp_path):
    (tmp_path / "prompt.txt").write_text("the king\n")
    command = [tmp_path / "prompt.txt", PROGRAM, "generate --precision fp32 --max-tokens 9 --init", trained.folder]
    prompt, none = run(*command[1:], "--prompt 'the king'").out, run(*command[1:]).out
    assert run(*command[1:], "--prompt '<|endoftext|>'").out == "<|endoftext|>" + none
    for script in ('"$@" <"$0"', '(sleep 1; cat "$0") | "$@"', '(printf the; sleep 1; echo " king") | "$@"',
                   '"$@" --prompt "the king" <<<old', '"$@" --prompt-file "$0" <<<old', '"$@" --prompt-file - <"$0"',
                   'gzip -c "$0" | "$@"', '(echo old; cat "$0") >"$0.2"; (read x; "$@") <"$0.2"',
                   'cat "$0" | "$@" --tensor-parallel 2 --ranks 2 --prompt-file -', '"$@" --prompt-file <(cat "$0")',
                   'cat "$0" | "$@" --prompt-file /dev/stdin', 'gzip -k "$0"; "$@" --prompt-file "$0.gz"'):
        assert shell(script, *command).out == prompt
    for script in ('"$@" <&-', ': | "$@"', 'echo | "$@"', '"$@" 0>"$0.out"', '"$@" --prompt "" <"$0"'):
        assert shell(script, *command).out == none
    never = ["bash", "-c", 'exec "$@" < <(exec sleep 20 2>&-)']
    refused(66, "standard input is open, but nothing came in 10 s; give --prompt TEXT, or </dev/null", never, *command)
    refused(65, "standard input has more than 16,777,216 bytes", ["bash", "-c", '"$@" </dev/zero'], *command)
    refused(65, "standard input: is a tar archive, not text", ["bash", "-c", 'tar -cf- "$0" | "$@"'], *command)


def test_the_bytes_of_a_file_are_the_same_under_each_launcher_and_a_terminal_has_them_escaped(trained, tmp_path):
    (tmp_path / "in").write_bytes(ANY_BYTES)
    generate = ["generate --max-tokens 9 --temperature 5 --init", trained.folder]
    two, path = "--tensor-parallel 2", tmp_path / "in"

    def output(script, launch, *options):
        shell(script, path, launch.command(*generate, *options), env=launch.env)
        return (tmp_path / "in.out").read_bytes()

    one, to_file = output('"$@" <"$0" >"$0.out"', ONE), '"$@" <"$0" >"$0.out"'
    assert one.startswith(ANY_BYTES[:-1])
    assert output(to_file, ranks(1)) == output('cat "$0" | "$@" | cat >"$0.out"', ranks(1)) == one
    wrapped = Launch(prefix=ranks(1).prefix + " " + shlex.join(["sh", "-c", '"$0" "$@"; true']), env=ranks(1).env)
    assert output(to_file, wrapped) == one
    by_option = output(to_file, ONE, two, "--ranks 2")
    assert by_option == output(to_file, ranks(2), two) and by_option.startswith(ANY_BYTES[:-1])
    for launch in (ONE, ranks(1), wrapped):
        screen, terminal = pty.openpty()
        with open(path, "rb") as stdin:
            subprocess.run(launch.command(*generate), stdin=stdin, stdout=terminal, timeout=LIMIT,
                           env=environment(launch.env), check=True)
        assert os.read(screen, 1000).startswith(b"\t" + rb"\x0d\x1b[2J\x01\x9b")
        os.close(screen)
        os.close(terminal)


def test_each_line_on_a_terminal_is_continued_until_ctrl_d(trained, on_terminal):
    lines = "the king\n\nthe king\n" + "the king " * 20 + "\nold\x1b[2J\n\x04"
    code, out, err = on_terminal(lines, "--num-samples 2")
    once = run(PROGRAM, "generate --max-tokens 20 --seed 3 --prompt 'the king' --num-samples 4 --init", trained.folder)
    a, b, c, d = once.out[:-1].split("\n---\n")
    assert len({a, b, c, d}) == 4 and code == 0 and out.startswith(f"{a}\n---\n{b}\n{c}\n---\n{d}\nold\x1b[2J"), out
    assert re.fullmatch(r"> > > > error: the line has .* tokens, .*\n> > \n1?[0-9]{2} tokens in .* tokens/s\n", err)


def test_a_given_prompt_or_no_terminal_asks_for_no_line(trained, on_terminal, tmp_path):
    (tmp_path / "prompt.txt").write_text("the king")
    for option in (["--prompt", "the king"], ["--prompt-file", tmp_path / "prompt.txt"]):
        code, out, err = on_terminal("old\n", option)
        assert code == 0 and out.startswith("the king") and "> " not in err
    assert "> " not in run(PROGRAM, "generate --max-tokens 5 --init", trained.folder).err


def test_several_ranks_take_no_lines_from_a_terminal(on_terminal):
    code, out, err = on_terminal("the king\n", "--ranks 2 --tensor-parallel 2")
    assert code == 2 and "takes lines from a terminal; with --tensor-parallel 2 give --prompt" in err and not out
