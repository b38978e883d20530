"""Key material of Parquet's own key tools (PKMT1), over a `KmsClient`.

As parquet-java's PropertiesDrivenCryptoFactory and the CryptoFactory of Arrow and pyarrow write and read it.

A file has a data key (DEK) for its footer and one for each column that has a key of its own. *Key material*, a flat
JSON object, tells how to get a DEK. In **double wrapping** (the default) a key encryption key (KEK) wraps the DEK here:
nonce (12 bytes), AES-GCM(KEK, DEK), tag (16), with the KEK's id (16 random bytes) as AAD. The KMS wraps the KEK. In
**single wrapping** the KMS wraps each DEK, without an AAD, which other readers could not repeat. **Internal** material
is the key's metadata in the Parquet file. **External** material is in ``_KEY_MATERIAL_FOR_<name>.json`` beside the
file, where it can be rotated; the key's metadata refers to it.

A wrapped key is bytes to a `KmsClient`, and text in Parquet. ``wrapped_text`` tells how one becomes the other:

- ``"base64"``: standard base64 with padding, as clients of services whose wrapped keys are binary do;
- ``"plain"``: the wrapped key is text itself, such as ``vault:v1:...`` or a JSON object: its UTF-8 bytes;
- ``"auto"``: in reading, text that is base64 counts as base64, and all other text as plain; in writing, printable text
  that is not base64 stays plain, and all else becomes base64. It always reads what it wrote. Only a service whose
  wrapped keys are text that looks like base64 (letters and digits, a multiple of 4) needs ``"plain"``.

Only the caller's client decides which KMS is called: ``kmsInstanceID`` and ``kmsInstanceURL`` in a file are never used.
The master key's id comes from the file; ``encryption.allowed-key-ids`` of the client limits it.
"""

from ags_fast.parquet.keytools.factory import CryptoFactory, KeyRetriever, clear_cache, resolve
from ags_fast.parquet.keytools.material import describe, material_path, parse_column_keys
from ags_fast.parquet.keytools.rotation import rotate

__all__ = [
    "CryptoFactory",
    "KeyRetriever",
    "clear_cache",
    "describe",
    "material_path",
    "parse_column_keys",
    "resolve",
    "rotate",
]
