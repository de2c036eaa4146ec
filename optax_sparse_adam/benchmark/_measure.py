"""Takes turns and times them."""

import time
from collections.abc import Sequence

from ._contestants import DENSE, PHASES, Contestant
from ._environment import seconds
from ._problem import NUM_BATCHES, Batches

_WARMUP = 2
_REST_SECONDS = 0.05  # OpenMP threads spin for some milliseconds
_FEWEST = 5
# Who has run for so long in a phase drops out of it, after _FEWEST rounds.
_ENOUGH_SECONDS = 10.0
_TOO_SLOW_SECONDS = 5.0  # a dense step
_SHARE = 0.9  # of the free memory; what the system and the compiler take is unknown

Times = dict[tuple[str, str], list[float]]
Skipped = dict[str, str]


def groups(
    contestants: Sequence[Contestant], free: int | None
) -> tuple[list[list[Contestant]], Skipped]:
    """Who can be in memory at the same time.

    Returns:
      Groups that take turns, one group after the other; and for each contestant that
      does not even fit alone, why.
    """
    limit = float("inf") if free is None else _SHARE * free
    fitting: list[list[Contestant]] = []
    skipped = {}
    for contestant in contestants:
        if contestant.memory > limit:
            skipped[contestant.name] = (
                f"needs {contestant.memory / 1e9:,.1f} GB of memory, and may take "
                f"{limit / 1e9:,.1f} GB of what is free"
            )
            continue
        for group in fitting:
            if sum(other.memory for other in group) + contestant.memory <= limit:
                group.append(contestant)
                break
        else:
            fitting.append([contestant])
    return fitting, skipped


class Turns:
    """A group that runs in rounds.

    Each turn is like a training loop of this contestant alone: a run on the batch
    before, not timed, which wakes its threads and brings its data into the caches, and
    the one that is timed. Then all rest until its threads, which spin for a while after
    their work, have gone to sleep: the next one needs the cores.

    Args:
      group: The contestants. Each round begins with another one, and every other cycle
        of rounds goes backwards, so that nobody always comes after the same one, which
        may have emptied the caches.
      batches: What they run on, the next batch in each round. The step takes another
        one than the update, which would otherwise leave its rows in the caches.
      slow_dense: Measure a dense step however long it takes.

    Attributes:
      seconds: Of each round, by phase and name.
      skipped: Who was left out, and why.
    """

    def __init__(
        self, group: Sequence[Contestant], batches: Batches, slow_dense: bool = False
    ) -> None:
        self._group, self._batches, self._slow_dense = group, batches, slow_dense
        self.seconds: Times = {(p, c.name): [] for c in group for p in c.phases}
        self.skipped: Skipped = {}

    def run(self, repeats: int) -> None:
        """Runs some rounds to warm up, and `repeats` rounds that count."""
        for contestant in self._group:
            try:
                contestant.start(self._batches)
            except RuntimeError as error:
                self._leave_out(contestant, str(error))
        for number in range(-_WARMUP, repeats):
            cycle, first = divmod(number, len(self._group))
            order = (*self._group[first:], *self._group[:first])
            for phase in PHASES:
                for contestant in order[:: -1 if cycle % 2 else 1]:
                    if self._takes_part(contestant, phase):
                        self._turn(contestant, phase, number)

    def stop(self) -> None:
        """Gives the memory back."""
        for contestant in self._group:
            contestant.stop()

    def _takes_part(self, contestant: Contestant, phase: str) -> bool:
        if phase not in contestant.phases or contestant.name in self.skipped:
            return False
        taken = self.seconds[phase, contestant.name]
        return len(taken) < _FEWEST or sum(taken) <= _ENOUGH_SECONDS

    def _turn(self, contestant: Contestant, phase: str, number: int) -> None:
        shift = PHASES.index(phase) * NUM_BATCHES // len(PHASES)
        batch = number + shift
        try:
            contestant.run(phase, (batch - 1) % NUM_BATCHES)
            taken = seconds(contestant.run, phase, batch % NUM_BATCHES)
        except RuntimeError as error:  # out of memory after all, or no such type
            self._leave_out(contestant, str(error))
            return
        time.sleep(_REST_SECONDS)
        slow = contestant.name == DENSE and taken > _TOO_SLOW_SECONDS
        if number >= 0:
            self.seconds[phase, contestant.name].append(taken)
        elif slow and not self._slow_dense:
            self._leave_out(contestant, f"takes {taken:.0f} s a step; --dense always")

    def _leave_out(self, contestant: Contestant, why: str) -> None:
        self.skipped[contestant.name] = why.strip().partition("\n")[0]
        contestant.stop()
