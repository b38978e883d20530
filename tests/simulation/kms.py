"""A KMS whose master keys are in the simulated world, so that a world and its keys go back and forth together."""

from __future__ import annotations

from ags_fast.errors import KeyAccessError
from ags_fast.keys import KmsClient
from simulation.store import SimStore

PROPERTIES = {"encryption.kms-impl": "simulation.kms:SimKms"}


class SimKms(KmsClient):
    """Names the master key and its version in each wrap. It hides nothing: the keys of a simulation are no secrets."""

    provider = "sim"

    def wrap_key(self, key: bytes, wrapping_key_id: str) -> bytes:
        return f"{wrapping_key_id}:{self.current_version(wrapping_key_id)}:".encode() + bytes(b ^ 0x55 for b in key)

    def unwrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        key_id, _, rest = wrapped.partition(b":")
        version, _, key = rest.partition(b":")
        newest, destroyed = SimStore.door.ask("kms", wrapping_key_id)
        if key_id.decode() != wrapping_key_id or int(version) > newest or int(version) in destroyed:
            raise KeyAccessError(f"the master key {wrapping_key_id} has not wrapped this")
        return bytes(b ^ 0x55 for b in key)

    def rewrap_key(self, wrapped: bytes, wrapping_key_id: str) -> bytes:
        return self.wrap_key(self.unwrap_key(wrapped, wrapping_key_id), wrapping_key_id)

    def key_version(self, wrapped: bytes) -> str | None:
        """See `KmsClient.key_version`."""
        return wrapped.split(b":")[1].decode()

    def current_version(self, wrapping_key_id: str) -> str:
        return str(SimStore.door.ask("kms", wrapping_key_id)[0])
