"""The commits between a good and a bad one, and which of them halves the others best."""

from __future__ import annotations

from collections.abc import Iterable

from qgate.bisecting.record import CommitName
from qgate.errors import QgateError
from qgate.storage.git import GitRepository


class CommitRange:
    """Commits that may be the first red one; shrinks with every verdict."""

    def __init__(self, repository: GitRepository, good: str, bad: str) -> None:
        self._git = repository
        self.good, self.bad = repository.commit_of(good), repository.commit_of(bad)
        base = self._merge_base()
        if self.good == self.bad:
            raise QgateError(
                f"{good!r} and {bad!r} are the same commit: name an earlier one that is green."
            )
        if base != self.good:
            hint = f"such as their merge base {base[:12]}" if base else "they have no common one"
            raise QgateError(
                f"{good!r} is no ancestor of {bad!r}: name a commit of its history, {hint}."
            )
        self._green = [self.good]
        self._red = self.bad
        self._skipped: set[str] = set()
        # Oldest first; names are read once.
        lines = repository.run(
            "log", "--topo-order", "--reverse", "--format=%H %s", self.bad, f"^{self.good}"
        ).splitlines()
        first = repository.run("log", "-1", "--format=%H %s", self.good)
        self._names = {line.partition(" ")[0]: line.partition(" ")[2] for line in (first, *lines)}

    def _merge_base(self) -> str:
        try:
            return self._git.run("merge-base", self.good, self.bad)
        except QgateError:
            return ""

    def name(self, commit: str) -> CommitName:
        return CommitName(commit, self._names[commit])

    @property
    def first_red(self) -> str:
        return self._red

    def in_order(self, commits: Iterable[str]) -> list[str]:
        """Sort commits by history, the oldest first."""
        places = {commit: index for index, commit in enumerate(self._names)}
        return sorted(commits, key=places.__getitem__)

    def next(self) -> str | None:
        """Return the commit that halves the remaining ones best; None if none can be judged."""
        return next((commit for commit in self._remaining() if commit not in self._skipped), None)

    def unknown(self) -> list[str]:
        """Return the remaining commits before the first red one, the oldest first."""
        return self.in_order(self._remaining())

    def steps(self) -> int:
        """Return about how many runs are left."""
        return len(set(self._remaining()) - self._skipped).bit_length()

    def add(self, commit: str, verdict: str) -> None:
        if verdict == "red":
            self._red = commit
        elif verdict == "green":
            self._green.append(commit)
        else:
            self._skipped.add(commit)

    def _remaining(self) -> list[str]:
        earlier = (f"^{commit}" for commit in self._green)
        lines = self._git.run("rev-list", "--bisect-all", self._red, *earlier).splitlines()
        commits = [line.partition(" ")[0] for line in lines]
        return [commit for commit in commits if commit != self._red]
