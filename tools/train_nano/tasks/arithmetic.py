"""Word problems of one to four steps, with each step written out: "48 + 17 = 65".

Every step is one that a small model can learn: sums below 10,000, factors and divisors from 2 to 12, and a product of
a longer number by its digits ("84 * 7 = 560 + 28 = 588").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, Setting, pick
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import ITEMS, NAMES

LIMIT = 9_999  # of every number that appears
ANSWER = "Answer: "


class Problem(NamedTuple):
    """A problem in words. numbers: what makes it another problem of the same template."""

    template: str
    numbers: tuple[int, ...]
    text: str
    steps: list[str]
    result: int


class Calculation:
    """Does the sums and writes them down."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def add(self, left: int, right: int) -> int:
        self.steps.append(f"{left} + {right} = {left + right}")
        return left + right

    def subtract(self, left: int, right: int) -> int:
        self.steps.append(f"{left} - {right} = {left - right}")
        return left - right

    def multiply(self, left: int, right: int) -> int:
        """Write partial products where the longer factor has several digits."""
        many, few = max(left, right), min(left, right)
        parts = _partial_products(many, few)
        middle = " + ".join(map(str, parts)) + " = " if len(parts) > 1 else ""
        self.steps.append(f"{left} * {right} = {middle}{left * right}")
        return left * right

    def divide(self, left: int, right: int) -> int:
        self.steps.append(f"{left} / {right} = {left // right}")
        return left // right


def _partial_products(many: int, few: int) -> list[int]:
    """Parts of many * few, largest first, each a product of one digit."""
    if many <= 12 or few == 10:
        return [many * few]
    if few > 10:
        return [many * 10, *_partial_products(many, few - 10)] if few > 11 else [many * 10, many]
    digits = str(many)
    places = [int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits)]
    return [place * few for place in places if place]


def candidate(rng: Random) -> Candidate:
    """Draw a problem."""
    problem = pick(rng, _TEMPLATES)(rng)
    numbers = ",".join(map(str, problem.numbers))

    def build() -> Example:
        setting = draw_setting(rng)
        return _example(problem, setting, rng)

    return Candidate(f"{problem.template}:{numbers}", build)


def _example(problem: Problem, setting: Setting, rng: Random) -> Example:
    text = problem.text
    if rng.random() < 0.25:
        text = f"{text} {pick(rng, _REQUESTS)}"
    steps = "\n".join(problem.steps)
    answer = f"{ANSWER}{problem.result}"
    return Example(
        "arithmetic",
        setting.chat([Turn("user", text)]),
        None,
        setting.answer(steps, answer if setting.thinking else f"{steps}\n{answer}"),
        str(problem.result),
    )


_REQUESTS = (
    "Show the steps.",
    "Work it out.",
    "Give the number.",
    "Think step by step.",
    "Please calculate.",
    "Write each step.",
    "What is the answer?",
)


def _size(rng: Random) -> int:
    """Draw a number: mostly of two or three digits."""
    kind = rng.random()
    if kind < 0.15:
        return 2 + int(rng.random() * 8)
    if kind < 0.6:
        return 10 + int(rng.random() * 90)
    return 100 + int(rng.random() * 900)


def _few(rng: Random) -> int:
    return 2 + int(rng.random() * 11)


def _below(rng: Random, limit: int) -> int:
    """Draw a number of 2 to limit, or 1 where that is the limit; not larger than `_size` would give."""
    return min(2 + int(rng.random() * (limit - 1)), _size(rng)) if limit > 1 else 1


def _two_names(rng: Random) -> tuple[str, str]:
    first = pick(rng, NAMES)
    while (second := pick(rng, NAMES)) == first:
        pass
    return first, second


_OPENINGS = (
    "{n} has {x} {items}.",
    "{n} owns {x} {items}.",
    "{n} starts with {x} {items}.",
    "There are {x} {items} in a box that belongs to {n}.",
    "{n} collected {x} {items}.",
    "In the morning {n} had {x} {items}.",
    "A shelf of {n} holds {x} {items}.",
)
_GAINS = (
    "{n} buys {x} more.",
    "{n} finds {x} more {items}.",
    "{m} gives {n} {x} {items}.",
    "Then {n} gets {x} more from {m}.",
    "Later {x} {items} are added.",
    "{n} receives another {x}.",
    "{n} picks up {x} others.",
    "Another {x} {items} arrive.",
)
_LOSSES = (
    "{n} gives {x} to {m}.",
    "{n} loses {x} of them.",
    "{n} sells {x} {items}.",
    "Then {x} are used.",
    "{m} takes {x} {items} away.",
    "{x} {items} break.",
    "{n} throws {x} away.",
    "Then {n} sends {x} of the {items} to {m}.",
)
_TIMES = (
    "Then the number grows to {k} times as many.",
    "After a week there are {k} times as many {items}.",
    "{n} works hard until there are {k} times as many.",
    "By magic every one of the {items} becomes {k} {items}.",
)
_TWICE = (
    "Then the number doubles.",
    "{n} doubles the number of {items}.",
    "A week later there are twice as many {items}.",
)
_SHARES = (
    "{n} puts them into {k} equal bags and keeps one bag.",
    "{n} shares the {items} equally among {k} people, {n} being one of them.",
    "The {items} are split into {k} equal parts and {n} keeps one part.",
    "{n} divides them equally among {k} friends; now count what one friend gets.",
)
_QUESTIONS = (
    "How many {items} does {n} have now?",
    "How many {items} are there in the end?",
    "How many are left?",
    "What is the number of {items} now?",
    "How many {items} is that?",
    "Count the {items} at the end.",
)
_ASIDES = (
    "It is a sunny day.",
    "{m} watches.",
    "The {items} are very old.",
    "{n} likes {items}.",
    "Nobody else is there.",
    "It takes a while.",
    "{m} does not mind.",
)


def _story(rng: Random) -> Problem:
    """A number of things that changes one to four times."""
    n, m = _two_names(rng)
    items = pick(rng, ITEMS)[1]
    value = _size(rng)
    numbers = [value]
    kinds = []
    lines = [pick(rng, _OPENINGS).format(n=n, m=m, items=items, x=value)]
    sums = Calculation()
    for _ in range(1 + int(rng.random() * 4)):
        kind, x, value = _event(rng, sums, value)
        wordings = {"+": _GAINS, "-": _LOSSES, "*": _TIMES, "/": _SHARES}[kind]
        if rng.random() < 0.08:
            lines.append(pick(rng, _ASIDES).format(n=n, m=m, items=items))
        if kind == "*" and x == 2 and rng.random() < 0.5:
            wordings = _TWICE
        lines.append(pick(rng, wordings).format(n=n, m=m, items=items, x=x, k=x))
        numbers.append(x)
        kinds.append(kind)
    lines.append(pick(rng, _QUESTIONS).format(n=n, items=items))
    return Problem("story" + "".join(kinds), tuple(numbers), " ".join(lines), sums.steps, value)


def _event(rng: Random, sums: Calculation, value: int) -> tuple[str, int, int]:
    """Draw what happens to value: its sign, its operand, the new value."""
    kind = rng.random()
    if kind < 0.15 and 2 <= value <= 900:
        k = min(_few(rng), LIMIT // value)
        return "*", k, sums.multiply(value, k)
    if kind < 0.35:
        divisors = [k for k in range(2, 13) if value % k == 0 and 2 <= value // k < 100]
        if divisors:
            k = pick(rng, divisors)
            return "/", k, sums.divide(value, k)
    if kind < 0.67 and value > 2:
        x = _below(rng, value - 1)
        return "-", x, sums.subtract(value, x)
    x = min(_size(rng), LIMIT - value)
    if x < 1:
        x = _below(rng, value - 1)
        return "-", x, sums.subtract(value, x)
    return "+", x, sums.add(value, x)


def _expression(rng: Random) -> Problem:
    """Bare sums in digits."""
    sums = Calculation()
    a, b, c, k = _size(rng), _size(rng), _size(rng), _few(rng)
    kind = int(rng.random() * 8)
    if kind == 0:
        text, result = f"{a} + {b}", sums.add(a, b)
    elif kind == 1:
        a, b = max(a, b), min(a, b)
        text, result = f"{a} - {b}", sums.subtract(a, b)
    elif kind == 2:
        a = min(a, LIMIT // k)
        text, result = f"{a} * {k}", sums.multiply(a, k)
    elif kind == 3:
        q = 2 + int(rng.random() * 98)
        a = q * k
        text, result = f"{a} / {k}", sums.divide(a, k)
    elif kind == 4:
        text, result = f"{a} + {b} + {c}", sums.add(sums.add(a, b), c)
    elif kind == 5:
        b = min(b, (LIMIT - a) // k)
        text, result = f"{a} + {b} * {k}", sums.add(a, sums.multiply(b, k))
    elif kind == 6:
        a = min(a, LIMIT // (2 * k))
        b = min(b, LIMIT // (2 * k))
        text, result = f"({a} + {b}) * {k}", sums.multiply(sums.add(a, b), k)
    else:
        c = min(c, a + b - 1)
        text, result = f"{a} + {b} - {c}", sums.subtract(sums.add(a, b), c)
    wording = pick(rng, ("What is {}?", "Calculate {}.", "{} = ?", "How much is {}?", "Compute {}.", "Work out {}."))
    return Problem(f"expression{kind}", (a, b, c, k), wording.format(text), sums.steps, result)


def _shopping(rng: Random) -> Problem:
    """One or two kinds of things at a price each; perhaps with change."""
    n, _ = _two_names(rng)
    (one, many), (other_one, other_many) = pick(rng, ITEMS), pick(rng, ITEMS)
    while other_one == one:
        other_one, other_many = pick(rng, ITEMS)
    count, other_count = _few(rng), _few(rng)
    price, other_price = 2 + int(rng.random() * 98), 2 + int(rng.random() * 98)
    sums = Calculation()
    coin = pick(rng, ("coins", "euros", "dollars", "crowns"))
    total = sums.multiply(count, price)
    numbers = [count, price]
    lines = [
        pick(
            rng,
            (
                f"{_article(one)} costs {price} {coin}.",
                f"The price of one {one} is {price} {coin}.",
                f"In a shop each {one} costs {price} {coin}.",
            ),
        )
    ]
    bought = f"{count} {many}"
    template = "shop"
    if rng.random() < 0.6:
        template += "2"
        numbers += [other_count, other_price]
        total = sums.add(total, sums.multiply(other_count, other_price))
        lines.append(
            pick(
                rng, (f"{_article(other_one)} costs {other_price} {coin}.", f"One {other_one} is {other_price} {coin}.")
            )
        )
        bought += f" and {other_count} {other_many}"
    lines.append(pick(rng, (f"{n} buys {bought}.", f"{n} wants {bought}.", f"{n} takes {bought}.")))
    if rng.random() < 0.4:
        template += "change"
        paid = total + _below(rng, min(500, LIMIT - total))
        numbers.append(paid)
        lines.append(pick(rng, (f"{n} pays with {paid} {coin}.", f"{n} had {paid} {coin} before.")))
        lines.append(pick(rng, (f"How many {coin} are left?", f"How many {coin} does {n} keep?")))
        total = sums.subtract(paid, total)
    else:
        lines.append(
            pick(
                rng,
                (f"How many {coin} does {n} pay?", f"What is the total price in {coin}?", "How much is that in all?"),
            )
        )
    return Problem(template, tuple(numbers), " ".join(lines), sums.steps, total)


def _article(noun: str) -> str:
    return f"An {noun}" if noun[0] in "aeio" else f"A {noun}"


def _packs(rng: Random) -> Problem:
    """Packs of equal size and loose pieces."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    packs, size, loose = _few(rng), _size(rng), _size(rng)
    sums = Calculation()
    box = pick(rng, ("bag", "crate", "drawer", "carton", "tray"))
    text = pick(
        rng,
        (
            f"{n} has {packs} {box}s with {size} {many} each and {loose} loose {many}. How many {many} is that in all?",
            f"Each of {packs} {box}s holds {size} {many}. {n} adds {loose} more {many}. How many {many} are there?",
            f"{m} fills {packs} {box}s. Every {box} gets {size} {many}, and {loose} stay on the table. "
            f"How many {many} does {m} have?",
            f"A {box} holds {size} {many}. How many {many} are in {packs} {box}s if {n} has {loose} beside them?",
        ),
    )
    result = sums.add(sums.multiply(packs, size), loose) if packs * size + loose <= LIMIT else 0
    if not result:
        return _packs(rng)
    return Problem("packs", (packs, size, loose), text, sums.steps, result)


def _journey(rng: Random) -> Problem:
    """Equal parts of a way, then another part."""
    n, _ = _two_names(rng)
    speed, hours, rest = 5 + int(rng.random() * 115), _few(rng), _size(rng)
    sums = Calculation()
    kind = int(rng.random() * 3)
    way = sums.multiply(speed, hours)
    if kind == 0:
        text = pick(
            rng,
            (
                f"A train goes {speed} km an hour. How far does it get in {hours} hours?",
                f"{n} drives {hours} hours at {speed} km an hour. How many km is that?",
                f"At {speed} km an hour, how many km are done after {hours} hours?",
            ),
        )
    elif kind == 1:
        way = sums.add(way, rest)
        text = pick(
            rng,
            (
                f"{n} drives {hours} hours at {speed} km an hour and then {rest} km more. How far is that in km?",
                f"A bus goes {speed} km an hour for {hours} hours, then another {rest} km. How long is the whole way?",
                f"{n} walks {rest} km and then rides {hours} hours at {speed} km an hour. How many km in all?",
            ),
        )
    else:
        whole = way + rest
        way = sums.subtract(whole, way)
        rest = whole
        text = pick(
            rng,
            (
                f"A trip has {whole} km. {n} drives {hours} hours at {speed} km an hour. How many km remain?",
                f"The way to the sea is {whole} km. After {hours} hours at {speed} km an hour, how far is it still?",
            ),
        )
    return Problem(f"journey{kind}", (speed, hours, rest), text, sums.steps, way)


def _compare(rng: Random) -> Problem:
    """One has more, fewer or a multiple of what another has; the question is about one or both."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    base = _size(rng)
    sums = Calculation()
    kind = int(rng.random() * 3)
    if kind == 0:
        x = _size(rng)
        other = sums.add(base, x)
        relation = pick(rng, (f"{m} has {x} more than {n}.", f"{m} has {x} {many} more."))
    elif kind == 1:
        base += 2
        x = _below(rng, base - 1)
        other = sums.subtract(base, x)
        relation = pick(rng, (f"{m} has {x} fewer than {n}.", f"{m} has {x} {many} less."))
    else:
        x = min(_few(rng), (LIMIT - base) // base)
        other = sums.multiply(base, x)
        relation = pick(rng, (f"{m} has {x} times as many.", f"{m} has {x} times as many {many} as {n}."))
    both = rng.random() < 0.5
    if both:
        result = sums.add(base, other)
        question = pick(rng, ("How many do they have together?", f"How many {many} do both have?"))
    else:
        result = other
        question = pick(rng, (f"How many {many} does {m} have?", f"How many does {m} have?"))
    opening = pick(rng, (f"{n} has {base} {many}.", f"{n} counts {base} {many}."))
    return Problem(f"compare{kind}{both}", (base, x), f"{opening} {relation} {question}", sums.steps, result)


def _sharing(rng: Random) -> Problem:
    """An equal share, of one heap or of two, perhaps with something added."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    k, share = _few(rng), 2 + int(rng.random() * 98)
    total = k * share
    sums = Calculation()
    kind = int(rng.random() * 3)
    people = pick(rng, ("children", "friends", "teams", "guests", "groups"))
    if kind == 0:
        x = 0
        result = sums.divide(total, k)
        text = pick(
            rng,
            (
                f"{total} {many} are shared equally among {k} {people}. How many does each get?",
                f"{n} divides {total} {many} equally among {k} {people}. How many {many} are that for each?",
                f"How many {many} does each of {k} {people} get if {total} are shared equally?",
            ),
        )
    elif kind == 1:
        x = _below(rng, total - 1)
        result = sums.divide(sums.add(total - x, x), k)
        text = pick(
            rng,
            (
                f"{n} has {total - x} {many} and {m} has {x}. They share all of them equally among {k} {people}. "
                "How many does each get?",
                f"{total - x} {many} and {x} more are divided equally among {k} {people}. How many for each?",
            ),
        )
    else:
        x = _size(rng)
        result = sums.add(sums.divide(total, k), x)
        text = pick(
            rng,
            (
                f"{total} {many} are shared equally among {k} {people}. {n} gets one share and had {x} before. "
                f"How many {many} does {n} have now?",
                f"{n} is one of {k} who share {total} {many} equally. {m} then gives {n} {x} more. "
                f"How many {many} has {n}?",
            ),
        )
    return Problem(f"sharing{kind}", (total, k, x), text, sums.steps, result)


def _ages(rng: Random) -> Problem:
    """Ages now and in some years."""
    n, m = _two_names(rng)
    age, years = 3 + int(rng.random() * 60), 1 + int(rng.random() * 30)
    sums = Calculation()
    kind = int(rng.random() * 4)
    if kind == 0:
        k = 2 + int(rng.random() * 3)
        age = min(age, 30)
        result = sums.add(sums.multiply(age, k), years)
        text = pick(
            rng,
            (
                f"{n} is {age} years old. {m} is {k} times as old. How old will {m} be in {years} years?",
                f"{m} is {k} times as old as {n}, who is {age}. What is the age of {m} after {years} years?",
            ),
        )
    elif kind == 1:
        k = 1 + int(rng.random() * 40)
        result = sums.add(sums.add(age, k), years)
        text = pick(
            rng,
            (
                f"{n} is {age}. {m} is {k} years older. How old is {m} in {years} years?",
                f"{m} is {k} years older than {n}, who is {age} now. How old will {m} be in {years} years?",
            ),
        )
    elif kind == 2:
        k = 0
        age += years
        result = sums.subtract(age, years)
        text = pick(
            rng,
            (f"{n} is {age}. How old was {n} {years} years ago?", f"How old was {n}, now {age}, {years} years ago?"),
        )
    else:
        k = 2 + int(rng.random() * 60)
        result = sums.add(sums.add(age, years), sums.add(k, years))
        text = f"{n} is {age} and {m} is {k}. What is the sum of their ages in {years} years?"
    return Problem(f"ages{kind}", (age, years, k), text, sums.steps, result)


def _shapes(rng: Random) -> Problem:
    """Perimeter and area of rectangles."""
    a, b = 2 + int(rng.random() * 98), _few(rng)
    sums = Calculation()
    kind = int(rng.random() * 3)
    thing = pick(rng, ("garden", "room", "field", "sheet", "yard"))
    if kind == 0:
        result = sums.multiply(a, b)
        text = pick(
            rng,
            (
                f"A {thing} is {a} m long and {b} m wide. What is its area in square metres?",
                f"What is the area of a {thing} of {a} by {b} metres?",
            ),
        )
    elif kind == 1:
        b = 2 + int(rng.random() * 98)
        result = sums.multiply(sums.add(a, b), 2)
        text = pick(
            rng,
            (
                f"A {thing} is {a} m long and {b} m wide. How long is a fence around it?",
                f"What is the perimeter of a {thing} of {a} by {b} metres?",
            ),
        )
    else:
        cut = _below(rng, a * b - 1)
        result = sums.subtract(sums.multiply(a, b), cut)
        text = f"A {thing} is {a} m long and {b} m wide. A part of {cut} square metres is covered. How much is free?"
        return Problem("shapes2", (a, b, cut), text, sums.steps, result)
    return Problem(f"shapes{kind}", (a, b), text, sums.steps, result)


def _work(rng: Random) -> Problem:
    """So many a day, over days, by several people."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    rate, days, x = 2 + int(rng.random() * 60), _few(rng), _few(rng)
    sums = Calculation()
    kind = int(rng.random() * 3)
    verb = pick(rng, ("makes", "paints", "packs", "sorts", "washes", "counts"))
    if kind == 0:
        result = sums.multiply(sums.multiply(rate, days), min(x, 9))
        x = min(x, 9)
        text = f"{n} {verb} {rate} {many} an hour, {days} hours a day. How many {many} are that in {x} days?"
    elif kind == 1:
        other = 2 + int(rng.random() * 60)
        result = sums.multiply(sums.add(rate, other), days)
        x = other
        text = pick(
            rng,
            (
                f"{n} {verb} {rate} {many} a day and {m} {verb} {other}. How many {many} are that in {days} days?",
                f"Each day {n} {verb} {rate} {many} and {m} {verb} {other}. How many do both do in {days} days?",
            ),
        )
    else:
        x = _below(rng, rate * days - 1)
        result = sums.subtract(sums.multiply(rate, days), x)
        text = pick(
            rng,
            (
                f"{n} {verb} {rate} {many} a day for {days} days. {x} of them are given to {m}. How many are left?",
                f"In {days} days {n} {verb} {rate} {many} each day, but {x} are lost. How many {many} remain?",
            ),
        )
    return Problem(f"work{kind}", (rate, days, x), text, sums.steps, result)


def _average(rng: Random) -> Problem:
    """The mean of two to four numbers, which is whole."""
    n, _ = _two_names(rng)
    count = 2 + int(rng.random() * 3)
    mean = 10 + int(rng.random() * 86)
    numbers = [max(1, mean + int(rng.random() * 19) - 9) for _ in range(count - 1)]
    last = mean * count - sum(numbers)
    if last < 1:
        return _average(rng)
    numbers.append(last)
    sums = Calculation()
    total = numbers[0]
    for number in numbers[1:]:
        total = sums.add(total, number)
    result = sums.divide(total, count)
    listed = _listed(numbers)
    text = pick(
        rng,
        (
            f"What is the average of {listed}?",
            f"Find the mean of {listed}.",
            f"{n} scores {listed} points. What is the average?",
            f"On {count} days {n} reads {listed} pages. How many pages is that a day on average?",
        ),
    )
    return Problem("average", tuple(numbers), text, sums.steps, result)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


_FRACTIONS = (("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5), ("a tenth", 10))


def _fraction(rng: Random) -> Problem:
    """A part of a whole, or what is left of it."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    word, k = pick(rng, _FRACTIONS)
    share = 2 + int(rng.random() * 98)
    total = k * share
    sums = Calculation()
    part = sums.divide(total, k)
    kind = int(rng.random() * 3)
    x = 0
    if kind == 0:
        text = pick(
            rng,
            (
                f"What is {word} of {total}?",
                f"{n} has {total} {many} and gives {word} of them to {m}. How many does {m} get?",
                f"Out of {total} {many}, {word} are new. How many are new?",
            ),
        )
        result = part
    elif kind == 1:
        result = sums.subtract(total, part)
        text = pick(
            rng,
            (
                f"{n} has {total} {many} and gives {word} of them to {m}. How many does {n} keep?",
                f"Of {total} {many}, {word} are sold. How many {many} remain?",
                f"{n} uses {word} of {total} {many}. How many are left?",
            ),
        )
    else:
        x = _size(rng)
        result = sums.add(part, x)
        text = pick(
            rng,
            (
                f"{m} gets {word} of {total} {many} and had {x} before. How many {many} has {m} now?",
                f"{n} takes {word} of {total} {many} and then {x} more. How many is that?",
            ),
        )
    return Problem(f"fraction{kind}", (total, k, x), text, sums.steps, result)


def _savings(rng: Random) -> Problem:
    """Money earned or saved week by week, with something spent or owned before."""
    n, m = _two_names(rng)
    coin = pick(rng, ("coins", "euros", "dollars", "crowns"))
    rate, weeks, x = 3 + int(rng.random() * 97), _few(rng), _size(rng)
    span = pick(rng, ("week", "month", "day"))
    verb = pick(rng, ("saves", "earns", "gets", "puts aside"))
    sums = Calculation()
    kind = int(rng.random() * 3)
    if kind == 0:
        result = sums.add(x, sums.multiply(rate, weeks))
        text = pick(
            rng,
            (
                f"{n} has {x} {coin} and {verb} {rate} every {span}. How many {coin} are there after {weeks} {span}s?",
                f"{n} {verb} {rate} {coin} a {span} for {weeks} {span}s and had {x} before. How many {coin} is that?",
            ),
        )
    elif kind == 1:
        total = rate * weeks
        x = _below(rng, total - 1)
        result = sums.subtract(sums.multiply(rate, weeks), x)
        text = pick(
            rng,
            (
                f"{n} {verb} {rate} {coin} a {span}. After {weeks} {span}s a gift for {m} costs {x}. How much is left?",
                f"In {weeks} {span}s {n} {verb} {rate} {coin} each {span} and then spends {x}. How many {coin} remain?",
            ),
        )
    else:
        x = 0
        total = rate * weeks
        result = sums.divide(total, weeks)
        text = pick(
            rng,
            (
                f"{n} {verb} {total} {coin} in {weeks} {span}s, the same each {span}. How many are that a {span}?",
                f"How many {coin} a {span} are {total} {coin} in {weeks} {span}s?",
            ),
        )
    return Problem(f"savings{kind}", (rate, weeks, x), text, sums.steps, result)


def _seats(rng: Random) -> Problem:
    """Rows of seats, some of them taken."""
    n, _ = _two_names(rng)
    rows, seats = _few(rng), 4 + int(rng.random() * 40)
    place = pick(rng, ("hall", "bus", "cinema", "theatre", "train", "classroom"))
    sums = Calculation()
    total = sums.multiply(rows, seats)
    taken = _below(rng, total - 1)
    left = sums.subtract(total, taken)
    more = 0
    text = pick(
        rng,
        (
            f"A {place} has {rows} rows of {seats} seats. {taken} seats are taken.",
            f"There are {rows} rows with {seats} seats each in a {place}, and {taken} people sit there.",
        ),
    )
    if left > 2 and rng.random() < 0.5:
        more = _below(rng, left - 1)
        left = sums.subtract(left, more)
        text += pick(rng, (f" Then {more} more people come.", f" {n} reserves {more} of the others."))
    text += pick(rng, (" How many seats are free?", " How many seats are left?"))
    return Problem("seats", (rows, seats, taken, more), text, sums.steps, left)


def _transfer(rng: Random) -> Problem:
    """Two people; some things change hands."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    a, b = 2 + _size(rng), 2 + _size(rng)
    x = _below(rng, a - 1)
    sums = Calculation()
    opening = pick(rng, (f"{n} has {a} {many} and {m} has {b}.", f"{n} owns {a} {many}, {m} owns {b}."))
    event = pick(rng, (f"{n} gives {x} to {m}.", f"{m} gets {x} of them from {n}."))
    kind = int(rng.random() * 3)
    if kind == 0:
        result, question = sums.subtract(a, x), f"How many {many} does {n} have now?"
    elif kind == 1:
        result, question = sums.add(b, x), f"How many {many} does {m} have now?"
    else:
        first, second = sums.subtract(a, x), sums.add(b, x)
        larger, smaller, who = (first, second, n) if first > second else (second, first, m)
        if larger == smaller:
            return _transfer(rng)
        result = sums.subtract(larger, smaller)
        question = f"How many more than the other does {who} have then?"
    return Problem(f"transfer{kind}", (a, b, x), f"{opening} {event} {question}", sums.steps, result)


def _missing(rng: Random) -> Problem:
    """How much more is needed."""
    n, m = _two_names(rng)
    many = pick(rng, ITEMS)[1]
    have = _size(rng)
    sums = Calculation()
    if rng.random() < 0.5:
        needed = have + _size(rng)
        result = sums.subtract(needed, have)
        text = pick(
            rng,
            (
                f"{n} needs {needed} {many} but has only {have}. How many are missing?",
                f"{n} has {have} {many}. How many more does {n} need to have {needed}?",
                f"How many {many} must {m} add to {have} to get {needed}?",
            ),
        )
        return Problem("missing0", (have, needed), text, sums.steps, result)
    bags, size = _few(rng), 3 + int(rng.random() * 60)
    have = _below(rng, bags * size - 1)
    result = sums.subtract(sums.multiply(bags, size), have)
    text = pick(
        rng,
        (
            f"{n} wants to fill {bags} bags with {size} {many} each and has {have}. How many are missing?",
            f"For {bags} guests {n} needs {size} {many} each. {m} brings {have}. How many more are needed?",
        ),
    )
    return Problem("missing1", (bags, size, have), text, sums.steps, result)


_TEMPLATES: tuple[Callable[[Random], Problem], ...] = (
    *(_story,) * 6,
    *(_expression,) * 2,
    _shopping,
    _shopping,
    _packs,
    _journey,
    _compare,
    _compare,
    _sharing,
    _ages,
    _shapes,
    _work,
    _average,
    _fraction,
    _savings,
    _seats,
    _transfer,
    _missing,
)
