"""Keeps the garbage collector from visiting again what a process's first start has made."""

import gc


class FrozenStart:
    """Freezes the objects that live once a first model is ready: nearly all are of modules, of
    which some are imported by a start, and stay. A model's are a few thousand, which the collector
    visits in a millisecond, so those of later models are not frozen: to thaw them means to visit
    those of all modules, which takes longer than to load a small model. Owned by the worker."""

    def __init__(self) -> None:
        self._has_frozen = False
        self._holds_model = False
        """True while the frozen objects include those of a model."""

    def freeze(self) -> None:
        """Freeze what lives, the first time; called with a model that is ready."""
        gc.collect()
        if not self._has_frozen:
            gc.freeze()
            self._has_frozen = self._holds_model = True

    def collect(self, *, has_model: bool) -> None:
        """Collect what a reset has left. has_model: a model remains."""
        if not self._holds_model:
            gc.collect()
            return
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._holds_model = has_model
