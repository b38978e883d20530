"""Key management systems: clients, how properties name one, and what is counted of its calls."""

from __future__ import annotations

from ags_fast.keys.kms.accounts import (
    AUDIT_HOOK,
    UnaccountedError,
    add_calls,
    count_calls,
    kms_calls,
    same_counts,
    set_audit_hook,
)
from ags_fast.keys.kms.client import ALLOWED, KeyVersion, Kms, KmsClient, Wrapped, aes_key, check_key_id
from ags_fast.keys.kms.imports import KMS_IMPL, named_modules
from ags_fast.keys.kms.registry import KMS_TYPE, PROVIDERS, as_kms, check_travels, load_kms, shared_client

__all__ = ["ALLOWED", "AUDIT_HOOK", "KMS_IMPL", "KMS_TYPE", "PROVIDERS", "KeyVersion", "Kms", "KmsClient"]
__all__ += ["UnaccountedError", "Wrapped", "add_calls", "aes_key", "as_kms", "check_key_id", "check_travels"]
__all__ += ["count_calls", "kms_calls", "load_kms", "named_modules", "same_counts", "set_audit_hook", "shared_client"]
