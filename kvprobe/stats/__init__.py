"""Effects and their intervals: the only way a number leaves a probe."""

import lazy_loader

# Each name is imported at its first use; the stub beside this file lists them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
