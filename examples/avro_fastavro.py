"""Write and read an encrypted Avro file with fastavro, which takes any file object.

python examples/avro_fastavro.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import fastavro

from ags_fast import AgsReader, AgsWriter

SCHEMA = {
    "type": "record",
    "name": "order",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}],
}


def main() -> None:
    """Write three records, and read them."""
    key = os.urandom(16)  # keep it wrapped by a KMS: a dataset or an envelope does that
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "orders.avro.ags")
        with AgsWriter(path, key) as file:
            fastavro.writer(file, SCHEMA, [{"id": n, "name": f"order {n}"} for n in range(3)])
        length = path.stat().st_size  # keep it beside the key: a stream that was cut off would pass otherwise
        with AgsReader(path, key, length=length) as file:
            for record in fastavro.reader(file):
                print(record)


if __name__ == "__main__":
    main()
