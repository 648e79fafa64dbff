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
        table = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        names = table.schema_arrow.names
        if len(columns) > 1:
            columns = [name for name in dict.fromkeys(names) if name in columns or name == "\n".join(columns)]
        for column in columns:
            if column not in names:
                fail(BAD_DATA, f'there is no column "{column}" (--text-key); columns: {", ".join(names)}')
            if names.count(column) > 1:
                fail(BAD_DATA, f'there are {names.count(column)} columns "{column}"; give them different names')
        groups = (table.metadata.row_group(i) for i in range(table.num_row_groups))
        size = sum(group.total_byte_size for group in groups)
        rows = (4 << 20) * table.metadata.num_rows // max(size, 1)  # of 4 MiB
        for batch in table.iter_batches(batch_size=min(max(rows, 1), 64), columns=columns):
            for row in batch.to_pylist():
                write(row)
    except (pyarrow.ArrowException, OSError, TypeError, ValueError) as error:
        fail(BAD_DATA, error)


def records_of(reader):
    """Yields each record, or in its place a text that says how its quotes are not as RFC 4180 has them."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            no_end = "end of data" in str(error)
            yield "the quotes of a field have no end" if no_end else f"has text behind the quotes of a field ({error})"


def fault_of(record, names):
    """Says why a record cannot be used; "" if it can."""
    if isinstance(record, str):
        return record
    if len(record) != len(names):
        fields = f"{len(record)} field{'s' * (len(record) != 1)}"
        return f"has {fields}, and the first line has {len(names)}; a field with a delimiter needs quotes"
    try:
        "".join(record).encode()
    except UnicodeEncodeError:
        return "is not UTF-8; if it is Latin-1, convert the file with iconv -f ISO-8859-1 -t UTF-8"
    return ""


def fault_of_names(names, columns):
    if fault := fault_of(names, names):
        return fault
    for column in columns:
        if names.count(column) > 1:
            return f'names {names.count(column)} columns "{column}"; give them different names'
    return ""


def write_fault(fault, lines):
    """As many wrong rows as there are lines: a record that swallows others is too many to be skipped."""
    for _ in range(lines):
        write(fault)


def print_records(file, columns, delimiter):
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    records = records_of(reader)
    names = next(records, [])
    if fault := fault_of_names(names, columns):
        for _ in records:
            pass
        return write_fault(fault, reader.line_num)
    done = reader.line_num
    sys.stdout.buffer.write(b"\n" * done)
    for record in records:
        count, done = reader.line_num - done, reader.line_num
        if fault := record and fault_of(record, names):
            write_fault(fault, count)
        elif record:
            write(dict(zip(names, record)), count)
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
