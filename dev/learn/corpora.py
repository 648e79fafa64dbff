"""corpora.py: the corpora of sweep.py, in data/sweep. bible_austen has the text of data/bible_austen.sh, tokenized as
there. gcide is the dictionary of Debian's package dict-gcide, on which nothing was tuned.
"""
import gzip
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def command(*words, **keywords):
    if subprocess.run(words, stdout=subprocess.DEVNULL, check=False, **keywords).returncode:
        sys.exit(f"corpora.py: {shlex.join(words)} failed")


def make(corpus, vocab, program, out):
    """Every twentieth block of 100 entries of gcide is validation text, and the vocabulary is learned from the others.
    The blocks are shuffled, so that the first windows have all letters."""
    if corpus == "bible_austen":
        if not os.path.exists(f"{ROOT}/data/bible_austen/text/king_james_bible.txt"):
            command(f"{ROOT}/data/bible_austen.sh")
        text = f"{ROOT}/data/bible_austen/text"
        return command(program, "tokenize", text, "--train-bpe", str(vocab), "--output", out)
    command("apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "dict-gcide", cwd=out)
    command("bash", "-c", "dpkg -x dict-gcide_*.deb .", cwd=out)
    with gzip.open(f"{out}/usr/share/dictd/gcide.dict.dz", "rt", encoding="utf-8", errors="replace") as file:
        entries = [entry for entry in re.split(r"\n(?=\S)", file.read()) if not entry.startswith("00-database")]
    blocks = ["\n".join(entries[i:i + 100]) + "\n" for i in range(0, len(entries), 100)]
    for name, part in [("val", blocks[19::20]), ("train", [b for i, b in enumerate(blocks) if i % 20 != 19])]:
        random.Random(0).shuffle(part)
        with open(f"{out}/{name}.txt", "w", encoding="utf-8") as file:
            file.writelines(part)
    tokenize = [program, "tokenize", "--val-fraction", "0"]
    command(*tokenize, f"{out}/train.txt", "--train-bpe", str(vocab), "--output", out)
    return command(*tokenize, f"{out}/val.txt", "--tokenizer", out, "--output", f"{out}/val")


def shards(corpus, vocab, program):
    """Makes the corpus, or takes a folder of shards, and returns the options that name the shards."""
    if corpus not in ("bible_austen", "gcide") and not os.path.isdir(corpus):
        sys.exit(f"corpora.py: {corpus}: there is no such folder of shards, and the corpora are bible_austen and gcide")
    out = corpus if os.path.isdir(corpus) else f"{ROOT}/data/sweep/{corpus}_{vocab}"
    if not os.path.exists(out):
        print(f"making {out}", flush=True)
        shutil.rmtree(out + ".part", ignore_errors=True)
        os.makedirs(out + ".part")
        make(corpus, vocab, program, out + ".part")
        os.rename(out + ".part", out)
    val = "val/train" if os.path.isdir(f"{out}/val") else "val"
    return ["--train-data", f"{out}/train_*.bin", "--val-data", f"{out}/{val}_*.bin"]
