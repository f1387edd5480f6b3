"""Claims, fixed before the run, and the verdicts on them, computed from intervals."""

import lazy_loader

# Each name is imported at its first use; the stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
