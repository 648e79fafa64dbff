"""test_quickstart.py: what scripts/quickstart.sh chooses and says. A stand-in takes the trainer's place: its peak is
PEAK, its speed is SPEED, or the program measures that of a tiny model, and it trains as TRAIN says."""

import os
import re
import shutil
import signal

import pytest
from harness import ROOT, execute, make_script, on_path, run, wait_until

TRAINER = """
case $* in
    "plan --measure off"*) echo "device  a processor; peak ${PEAK:-0.2 TFLOP/s in fp32}, measured at start" ;;
    plan*) echo "$*" >>planned
          [ -z "${PLAN:-}" ] || eval "$PLAN"
          if [ -z "${SPEED:-}" ]; then exec ./program plan --layers 1 --heads 1 --channels 16 -t 16 -d 0; fi
          echo "time  1 s per step: measured here with 8 x 256 tokens, $SPEED tokens/s, 9 % of the peak" ;;
    tokenize*) echo "$*" >>tokenized
              truncate -s 4000000 data/bible_austen/train_000001.bin
              truncate -s 200000 data/bible_austen/val_000000.bin ;;
    generate*) echo "a sample" ;;
    *) echo "$*" >>trained
       eval "${TRAIN:-}" ;;
esac
"""


@pytest.fixture
def quickstart(tree):
    """quickstart(SPEED, NAME=VALUE...) runs the script in a tree with the text of Bible and Austen."""
    (tree / "train_gpt2").rename(tree / "program")
    make_script(tree / "train_gpt2", TRAINER)
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/quickstart.sh", tree / "scripts")
    for stand_in in ("scripts/install.sh", "bin/make", "bin/python3"):
        make_script(tree / stand_in, "")
    (tree / "data/bible_austen/text").mkdir(parents=True)
    for text in ("king_james_bible", "pride_and_prejudice"):
        (tree / f"data/bible_austen/text/{text}.txt").write_text("a text")

    def begin(speed="", by=execute, **env):
        env = on_path(tree / "bin", SPEED=speed, **{"TRAIN_SECONDS": None, **env})
        return by("scripts/quickstart.sh", cwd=tree, env=env)

    begin.tree = tree
    begin.lines = lambda name: (tree / name).read_text().splitlines() if (tree / name).exists() else []
    return begin


@pytest.mark.parametrize("peak, speed, shape, vocab, steps", [
    ("0.05 TFLOP/s", "4,480", "1 2 128", 8192, 520), ("0.312 TFLOP/s", "15,000", "1 2 128", 8192, 1750),
    ("0.313 TFLOP/s", "15,000", "4 2 128", 16384, 1750), ("0.833 TFLOP/s", "24,000", "4 2 128", 16384, 2810),
    ("0.834 TFLOP/s", "24,000", "4 3 192", 16384, 2810), ("989 TFLOP/s", "900,000", "6 6 384", 4096, 7810),
    ("unknown, so no MFU", "900,000", "6 6 384", 4096, 7810)])
def test_model_and_vocabulary_are_those_of_the_peak_and_the_steps_those_of_the_speed(
        peak, speed, shape, vocab, steps, quickstart):
    said = quickstart(speed, PEAK=peak)
    assert said.code == 0 and "too few" not in said.out and "a sample" in said.out, said
    assert f"--train-bpe {vocab} " in quickstart.lines("tokenized")[0]
    trained, planned = quickstart.lines("trained")[0], quickstart.lines("planned")
    shape = "--layers {} --heads {} --channels {} ".format(*shape.split())
    assert shape in trained and abs(int(re.search("--steps ([0-9]+)", trained)[1]) - steps) < 10
    assert len(planned) == 1 and shape in planned[0] and f"--vocab-size {vocab}" in planned[0]


def test_a_time_that_is_too_short_for_readable_text_is_named_with_one_that_is_not(quickstart):
    assert "too few for readable text: that takes about TRAIN_SECONDS=342 here" in quickstart(
        "3,584", TRAIN_SECONDS=60).out
    assert "too few" not in quickstart("3,584", TRAIN_SECONDS=342).out
    assert "TRAIN_SECONDS=4m is no whole number" in quickstart(TRAIN_SECONDS="4m").err


def test_a_second_start_continues_whatever_the_speed_is_then(quickstart):
    assert quickstart("3,584", TRAIN="exit 1").code == 1
    assert "continuing out/quickstart_bible_austen" in quickstart("900,000").out
    first, second = quickstart.lines("trained")
    assert first == second and len(quickstart.lines("tokenized")) == 1 and len(quickstart.lines("planned")) == 1


def test_the_speed_is_the_one_that_plan_measures(quickstart):
    said = quickstart(TRAIN_SECONDS=1)
    assert said.code == 0 and re.search("^[0-9]+ tokens/s: [0-9]+ steps of 2048 tokens in 1 s$", said.out, re.M), said


def test_a_link_to_a_file_without_an_ending_keeps_its_name(quickstart):
    (quickstart.tree / "blob").write_text("a text\n" * 200)
    (quickstart.tree / "d.csv").symlink_to("blob")
    quickstart("3,584", by=lambda script, **keywords: execute(script, "d.csv", **keywords))
    assert quickstart.lines("tokenized")[0].startswith(f"tokenize {quickstart.tree}/d.csv ")


@pytest.mark.parametrize("moment", ["PLAN", "TRAIN"])
def test_ctrl_c_says_how_to_go_on(moment, quickstart, start):
    work = {moment: "trap 'exit 75' INT; echo >here; sleep 60 & wait"}
    stopped = quickstart("3,584", by=start, TRAIN_SECONDS=9, **work)
    wait_until((quickstart.tree / "here").exists, moment)
    os.killpg(stopped.pid, signal.SIGINT)
    assert stopped.wait() == 75
    assert "\nstopped; to go on from here: TRAIN_SECONDS=9 scripts/quickstart.sh" in stopped.output


def test_help_and_bad_arguments():
    assert "Run again, it continues" in run("scripts/quickstart.sh --help").out
    assert execute("scripts/quickstart.sh no/such").code == 66 and execute("scripts/quickstart.sh --fast").code == 2
