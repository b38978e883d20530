"""What Parquet's specification fixes and several modules need: magic, sizes, algorithms, types of modules.

Sections are those of "Parquet Modular Encryption".
"""

from __future__ import annotations

from typing import get_args

from ags_fast._types import Algorithm

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)  # section 5.1; in the order of the union's fields, from 1

# Types of modules, as they stand in an AAD (section 4.4.2). PAGES stands for all pages of a column chunk.
FOOTER, COLUMN_METADATA, PAGES = 0, 1, 2
COLUMN_INDEX, OFFSET_INDEX, BLOOM_HEADER, BLOOM_BITSET = 6, 7, 8, 9

PLAIN_MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"  # PAR1 also with a signed footer
MAGIC_NBYTES = 4
TAIL_NBYTES = 8  # the footer's length and the magic
SIGNATURE_NBYTES = 28  # nonce and tag (section 5.5)
