#!/usr/bin/env python3
"""parquet_text.py COLUMN <FILE.parquet: prints each row's text in that column as a JSON line, {"COLUMN": "text"}.

`train_gpt2 tokenize` starts it for .parquet files. It reads the file in pieces, so it needs little memory.
"""

import json
import signal
import sys

NO_INPUT, BAD_DATA = 66, 65


def fail(code, message):
    print(" ".join(str(message).split()), file=sys.stderr)
    sys.exit(code)


try:
    import pyarrow
    from pyarrow import parquet
except ImportError as error:
    fail(NO_INPUT, f"pyarrow is needed for .parquet files: pip install pyarrow ({error})")


def print_column(file, column):
    names = file.schema_arrow.names
    if column not in names:
        fail(BAD_DATA, f'there is no column "{column}" (--text-key); columns: {", ".join(names)}')
    for batch in file.iter_batches(batch_size=64, columns=[column]):
        for text in batch.column(0).to_pylist():
            sys.stdout.buffer.write((json.dumps({column: text}, ensure_ascii=False) + "\n").encode())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        fail(2, "usage: parquet_text.py COLUMN <FILE.parquet")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends when nobody reads the lines any more
    try:
        print_column(parquet.ParquetFile(sys.stdin.buffer, buffer_size=1 << 20), sys.argv[1])
    except (pyarrow.ArrowException, OSError, TypeError, ValueError) as error:
        fail(BAD_DATA, error)
