#!/usr/bin/env python3
"""parquet_text.py COLUMNS <FILE.parquet: prints each row as a JSON line: its values in COLUMNS. One column must be
there, and of several, with line ends between them, those that are.

`train_gpt2` starts it for Parquet files. It reads the file in pieces, so it needs little memory.
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


def decoded(value):
    """Text that was written without the mark for UTF-8 is binary in Parquet. Other types are written as text."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        fail(BAD_DATA, f"a column is binary, and a value of it is not UTF-8 text: {error.reason} at byte {error.start}")


def print_rows(file, columns):
    names = file.schema_arrow.names
    if len(columns) > 1:
        columns = [name for name in dict.fromkeys(names) if name in columns]
    for column in columns:
        if column not in names:
            fail(BAD_DATA, f'there is no column "{column}" (--text-key); columns: {", ".join(names)}')
        if names.count(column) > 1:
            fail(BAD_DATA, f'there are {names.count(column)} columns "{column}"; give them different names')
    for batch in file.iter_batches(batch_size=64, columns=columns):
        for row in batch.to_pylist():
            sys.stdout.buffer.write((json.dumps(row, ensure_ascii=False, default=decoded) + "\n").encode())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends when nobody reads the lines any more
    try:
        # Without pre_buffer=False all of a row group's column is read at once.
        file = parquet.ParquetFile(sys.stdin.buffer, buffer_size=1 << 20, pre_buffer=False)
        print_rows(file, sys.argv[1].split("\n"))
    except (pyarrow.ArrowException, OSError, TypeError, ValueError) as error:
        fail(BAD_DATA, error)
