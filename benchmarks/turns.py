"""Takes turns and times them."""

import time

from contestants import DENSE
from machine import seconds
from problem import NUM_BATCHES

WARMUP = 2
REST_SECONDS = 0.05  # OpenMP threads spin for some milliseconds
FEWEST = 5
# Who has run for so long in a phase drops out of it, after FEWEST rounds.
ENOUGH_SECONDS = 10.0
TOO_SLOW_SECONDS = 5.0  # a dense step
SHARE = 0.9  # of the free memory; what the system and the compiler take is unknown


def groups(contestants, free):
    """Who can be in memory at the same time.

    Returns:
      Groups that take turns, one group after the other; and for each contestant that
      does not even fit alone, why.
    """
    limit = float("inf") if free is None else SHARE * free
    fitting, skipped = [], {}
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

    Attributes:
      seconds: Of each round, by phase and name.
      skipped: Who was left out, and why.
    """

    def __init__(self, group, batches):
        self.group, self.batches = group, batches
        self.phases = list(dict.fromkeys(p for c in group for p in c.phases))
        self.seconds = {(p, c.name): [] for c in group for p in c.phases}
        self.skipped = {}

    def run(self, repeats):
        """Runs some rounds to warm up, and `repeats` rounds that count."""
        for contestant in self.group:
            try:
                contestant.start(self.batches)
            except RuntimeError as error:
                self.leave_out(contestant, str(error))
        for number in range(-WARMUP, repeats):
            cycle, first = divmod(number, len(self.group))
            order = (*self.group[first:], *self.group[:first])
            for phase in self.phases:
                for contestant in order[:: -1 if cycle % 2 else 1]:
                    if self.takes_part(contestant, phase):
                        self.turn(contestant, phase, number)

    def stop(self):
        """Gives the memory back."""
        for contestant in self.group:
            contestant.stop()

    def takes_part(self, contestant, phase):
        if phase not in contestant.phases or contestant.name in self.skipped:
            return False
        taken = self.seconds[phase, contestant.name]
        return len(taken) < FEWEST or sum(taken) <= ENOUGH_SECONDS

    def turn(self, contestant, phase, number):
        shift = self.phases.index(phase) * NUM_BATCHES // len(self.phases)
        batch = number + shift
        try:
            contestant.run(phase, (batch - 1) % NUM_BATCHES)
            taken = seconds(contestant.run, phase, batch % NUM_BATCHES)
        except RuntimeError as error:  # out of memory after all, or no such type
            self.leave_out(contestant, str(error))
            return
        time.sleep(REST_SECONDS)
        if number >= 0:
            self.seconds[phase, contestant.name].append(taken)
        elif contestant.name == DENSE and taken > TOO_SLOW_SECONDS:
            self.leave_out(contestant, f"takes {taken:.0f} s a step")

    def leave_out(self, contestant, why):
        self.skipped[contestant.name] = why.strip().partition("\n")[0]
        contestant.stop()
