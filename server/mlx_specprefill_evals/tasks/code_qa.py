"""Questions about modules of the standard library, in other words than the code's.

The answer is a name in the code, so a string check judges it. A model may know parts of these modules by heart: the
random arm shows how much.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from .. import corpus
from ..errors import NotMeasuredError
from ..facts import Turn
from .base import Item, Space, Task
from .real import JOINED

ASK = "Question about the code above: {} Answer with the name alone."
DEPTHS = (0.1, 0.8)  # of the line with the answer: what lies behind is kept anyway


class Question(NamedTuple):
    """A question about a module. The answer is the name of a function, method or class in it."""

    module: str
    answer: str
    asked: str

    def line(self, source: str) -> str:
        """Return the line that defines the answer, "" if there is none or more than one."""
        found: list[str] = re.findall(rf"^ *(?:def|class) {self.answer}\b.*", source, re.MULTILINE)
        return found[0] if len(found) == 1 else ""


QUESTIONS = tuple(
    Question(*re.split(r"[.:] ?", row, maxsplit=2))
    for row in """
heapq.heappushpop: Which function avoids all work if the new element is the smallest anyway?
heapq.heapreplace: Which function may give back something larger than what was put in?
heapq._heapify_max: Which function turns a list into the opposite order in linear time, biggest first?
bisect.insort_left: Which function stores an element in front of its equals?
bisect.bisect_right: Which function tells where to insert behind all equals, and changes nothing?
textwrap.dedent: Which function strips the margin that all rows have in common?
textwrap.shorten: Which function cuts a passage off so that it fits, with a mark at its end?
textwrap._fix_sentence_endings: Which method puts two blanks behind a full stop?
shlex.push_source: Which method makes the lexer read from somewhere else for a while?
shlex.error_leader: Which method builds the beginning of a complaint as compilers print it?
fnmatch.translate: Which function makes a regular expression out of a wildcard?
functools.total_ordering: Which decorator completes the comparisons that somebody did not write?
functools.singledispatch: Which decorator picks an implementation by the class of what comes first?
functools.cached_property: Which class computes a value on first access and remembers it on the object?
functools.cmp_to_key: Which function adapts an old three-way comparison for sorting?
contextlib.suppress: Which class swallows errors of given kinds?
contextlib.redirect_stdout: Which class sends what is printed somewhere else?
contextlib.closing: Which class shuts a thing at the end of the block without owning it?
contextlib.ExitStack: Which class cleans up a number of things that is not known ahead, synchronously?
queue.LifoQueue: Which class hands out the newest entry first?
queue.PriorityQueue: Which class hands out the lowest entry first?
queue.task_done: Which method does a worker call after it has dealt with an entry?
statistics.multimode: Which function gives all the winners if several values are equally frequent?
statistics.median_grouped: Which function estimates the middle of values that were sorted into bins?
random.shuffle: Which method reorders a list in place?
random.choices: Which method draws with replacement?
random.triangular: Which distribution has a peak between two bounds and straight sides?
string.safe_substitute: Which method leaves a placeholder alone if it has no value for it?
string.capwords: Which function makes each first letter big?
copy._keep_alive: Which helper makes sure that temporary objects are not freed too early?
difflib.get_close_matches: Which function proposes corrections for a misspelling?
difflib.find_longest_match: Which method searches the biggest block that both sequences share?
glob.escape: Which function protects special characters so that they stand for themselves?
calendar.leapdays: Which function counts the longer years within a range?
calendar.monthrange: Which function tells on which day of the week a month begins and how long it is?
tempfile.mkdtemp: Which function creates a private folder that the caller must delete?
tempfile.SpooledTemporaryFile: Which class stays in memory until it has grown too big?
shutil.SameFileError: Which error says that source and destination are one and the same?
shutil.unpack_archive: Which function extracts a package into a folder?
sched.enterabs: Which method plans something for a fixed moment rather than after a delay?
csv.has_header: Which method guesses whether the first row holds titles?
csv.DictWriter: Which class puts rows out that are mappings?
socketserver.ThreadingMixIn: Which class answers each request beside the others in one process?
timeit.autorange: Which method finds out how many runs are needed for a reliable measurement?
linecache.checkcache: Which function throws away what has changed on disk?
zipfile.testzip: Which method reads all members and names the first damaged one?
fractions.limit_denominator: Which method finds the nearest simple ratio?
""".strip().splitlines()
)


def _code_qa(rng: random.Random, space: Space) -> Item:
    question = QUESTIONS[space.number % len(QUESTIONS)]
    source = next((module.source for module in corpus.modules() if module.name == question.module), "")
    line = question.line(source)
    if not line:
        raise NotMeasuredError(f"{question.module} of this Python does not define {question.answer} once")
    asked = ASK.format(question.asked)
    lines = source.splitlines()
    document = lines_around(rng, lines, lines.index(line), space.without(asked), space)
    return Item((Turn(f"{document}\n\n{asked}", question.answer),), (question.answer,), (line,))


def lines_around(rng: random.Random, lines: Sequence[str], at: int, budget: int, space: Space) -> str:
    """Return the lines around one of them, `budget` tokens at most, with that line at a random depth."""
    budget = int(budget * JOINED)
    left = int(rng.uniform(*DEPTHS) * budget)
    first, last, budget = at, at, budget - left
    while first and (size := space.count(lines[first - 1] + "\n")) <= left:
        first, left = first - 1, left - size
    budget += left
    while last < len(lines) and (size := space.count(lines[last] + "\n")) <= budget:
        last, budget = last + 1, budget - size
    return "\n".join(lines[first:last]).rstrip()


CODE_QA: dict[str, Task] = {"code_qa": Task(_code_qa, 16)}
