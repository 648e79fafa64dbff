#!/usr/bin/env python3
"""table_rows.py parquet|csv|tsv COLUMNS [PROGRAM...] <FILE: prints each row of a table as a JSON line. Of Parquet it
has the values in COLUMNS: one column must be there, and of several, with line ends between them, those that are. A name
may have line ends, too. PROGRAM unpacks the file.

`train_gpt2` starts it. It reads the file in pieces, so it needs little memory. Of CSV a line of the output is a line of
the file: blank where no record begins, and a text, which says what is wrong, for a record that cannot be used.
"""

import csv
import io
import json
import signal
import subprocess
import sys

NO_INPUT, BAD_DATA = 66, 65


def fail(code, message):
    print(" ".join(str(message).split())[:400], file=sys.stderr)  # a table may have thousands of columns
    sys.exit(code)


def decoded(value):
    """Text that was written without the mark for UTF-8 is binary in Parquet. Other types are written as text."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        fail(BAD_DATA, f"a column is binary, and a value of it is not UTF-8 text: {error.reason} at byte {error.start}")


def write(row, lines=1):
    sys.stdout.buffer.write((json.dumps(row, ensure_ascii=False, default=decoded) + "\n" * lines).encode())


def print_parquet(file, columns):
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        fail(NO_INPUT, f"pyarrow is needed for .parquet files: pip install pyarrow ({error})")
    try:
        # Without pre_buffer=False all of a row group's column is read at once.
        table = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        names = table.schema_arrow.names
        if len(columns) > 1:
            columns = [name for name in dict.fromkeys(names) if name in columns or name == "\n".join(columns)]
        for column in columns:
            if column not in names:
                fail(BAD_DATA, f'there is no column "{column}" (--text-key); columns: {", ".join(names)}')
            if names.count(column) > 1:
                fail(BAD_DATA, f'there are {names.count(column)} columns "{column}"; give them different names')
        for batch in table.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                write(row)
    except (pyarrow.ArrowException, OSError, TypeError, ValueError) as error:
        fail(BAD_DATA, error)


def fault_of(record, names, at_end):
    """Says why a record cannot be used; "" if it can."""
    if at_end:
        return "the quotes of a field have no end"
    if len(record) != len(names):
        fields = f"{len(record)} field{'s' * (len(record) != 1)}"
        return f"has {fields}, and the first line has {len(names)}; a field with a delimiter needs quotes"
    try:
        "".join(record).encode()
    except UnicodeEncodeError:
        return "is not UTF-8; if it is Latin-1, convert the file with iconv -f ISO-8859-1 -t UTF-8"
    return ""


def print_records(file, columns, delimiter):
    at_end = []

    def lines():
        yield from io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        at_end.append(True)  # the reader asks for more within a record only if its quotes have no end

    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines(), delimiter=delimiter)
    names = next(reader, [])
    for column in columns:
        if names.count(column) > 1:
            return write(f'names {names.count(column)} columns "{column}"; give them different names')
    done = reader.line_num
    sys.stdout.buffer.write(b"\n" * done)
    for record in reader:
        count, done = reader.line_num - done, reader.line_num
        fault = fault_of(record, names, at_end) if record else ""
        if at_end:  # as many wrong rows as it has lines: they may be too many to be skipped
            sys.stdout.buffer.write((json.dumps(fault) + "\n").encode() * count)
        elif record:
            write(fault or dict(zip(names, record)), count)
        else:
            sys.stdout.buffer.write(b"\n" * count)


def main(kind, columns, *program):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends when nobody reads the lines any more
    file, process, columns = sys.stdin.buffer, None, columns.split("\n")
    if program:
        try:
            process = subprocess.Popen(program, stdin=file, stdout=subprocess.PIPE)
        except OSError as error:
            fail(NO_INPUT, error)
        file = process.stdout
    if kind == "parquet":
        print_parquet(file, columns)
    else:
        print_records(file, columns, "," if kind == "csv" else "\t")
    sys.stdout.buffer.flush()
    if process and process.wait():
        sys.exit(BAD_DATA)  # the program has said why


if __name__ == "__main__":
    main(*sys.argv[1:])
