"""Progress bars on standard error: while loading, and while a long prompt is read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress


class Progress:
    """A callable ``(stage, done, total)`` that draws one bar per stage, on a terminal only.

    Bars vanish when their stage ends, so that nothing stands between the text that is streamed.
    """

    def __init__(self, visible: bool | None = None) -> None:
        self._visible = sys.stderr.isatty() if visible is None else visible
        self._bars: rich.progress.Progress | None = None
        self._tasks: dict[str, rich.progress.TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._visible:
            return
        bars = self._bars or self._open()
        if stage not in self._tasks:
            self._tasks[stage] = bars.add_task(stage, total=total)
        bars.update(self._tasks[stage], completed=done, total=total)
        if done >= total:
            bars.remove_task(self._tasks.pop(stage))
        if not self._tasks:
            self.close()

    def close(self) -> None:
        """Take all bars away; a later call opens them again."""
        if self._bars:
            self._bars.stop()
        self._bars = None
        self._tasks = {}

    def _open(self) -> rich.progress.Progress:
        import rich.console
        import rich.progress

        self._bars = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
        self._bars.start()
        return self._bars
