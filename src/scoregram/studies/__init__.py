"""Studies of papers, one folder each: the ledger of a paper's claims, and its replication from presets to record.

Every study uses the files beside the folders: the ledger's types, the record, its verification, the page.
Studies are clients of the library: nothing but the command line imports them.
"""

from scoregram.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
