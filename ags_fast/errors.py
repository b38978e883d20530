"""What can go wrong, by what a caller would do about it.

A caller's own mistakes are ``TypeError``, ``ValueError`` and ``BufferError``; an error of a file or a file-like object
passes through untouched. No message holds a key or plaintext.
"""

from __future__ import annotations

__all__ = ["AgsError", "ConcurrentChangeError", "ExpiredError", "FormatError", "IntegrityError", "JobEndedError"]
__all__ += ["KeyAccessError", "KeyLimitError", "PolicyError", "UnknownKeyError", "UnknownOutcomeError"]
__all__ += ["UnsupportedChangeError"]


class AgsError(Exception):
    """Base of everything that ags_fast itself finds wrong."""


class FormatError(AgsError, ValueError):
    """The bytes are not in the format, or a size is one that the format cannot have."""


class IntegrityError(AgsError):
    """The bytes are not what was sealed: changed, cut, moved, or opened with another key or another AAD.

    AES-GCM cannot tell these apart. It is not an ``OSError``: trying again does not help.

    ``block_index`` is the lowest bad block of an AGS1 stream. For Parquet, ``module``, ``row_group``, ``column`` and
    ``page`` say where. What does not apply is ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        block_index: int | None = None,
        module: str | None = None,
        row_group: int | None = None,
        column: str | None = None,
        page: int | None = None,
    ) -> None:
        super().__init__(message)
        self.block_index = block_index
        self.module = module
        self.row_group = row_group
        self.column = column
        self.page = page


class KeyLimitError(AgsError):
    """The key has sealed as many messages as it may: 2**32 (NIST SP 800-38D, section 8.3). Use a new key."""


class KeyAccessError(AgsError):
    """A key cannot be had: the key management system refused it, does not know it or does not answer."""


class PolicyError(AgsError):
    """The bytes may be intact, but they are less protected than the caller asked for."""


class ConcurrentChangeError(AgsError):
    """Somebody else has changed it since it was read. Nothing was written: read it again, and change that.

    Attributes:
        path: The file of a dataset that was changed; None: no single file, or not known.
        by_job: The job that has written what is there now; None: not known.
    """

    path: str | None = None
    by_job: str | None = None


class UnsupportedChangeError(AgsError, NotImplementedError):
    """The catalog's protocol has no words for a change. Nothing was sent."""


class UnknownKeyError(KeyAccessError):
    """A key store has no key of this id."""


class JobEndedError(ConcurrentChangeError):
    """Another process has ended the job: the head of the log says so. Nothing was committed, and nothing will be."""


class UnknownOutcomeError(AgsError):
    """Nobody knows whether the job was committed, or will be: the storage did not answer. Nothing was deleted."""


class ExpiredError(AgsError, FileNotFoundError):
    """The version was expired: the dataset has only newer ones."""
