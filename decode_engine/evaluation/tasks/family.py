"""Families of tasks: statements to put into a text, and questions about them.

Facts have the form "The access code of the silver falcon is 48213". The wording is the one that the embedded reader was
trained with, the words of names and values are others. Task `sentences` is for models that were trained on what people
write: its questions are worded differently from one another, its names and values are ordinary. A small model of that
kind takes the facts of `single`, of which every one is "the password of the sparkling drum is 4821", for one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


ATTRIBUTES = (
    "access code",
    "serial number",
    "secret word",
    "phone number",
    "magic number",
    "password",
    "room number",
    "owner",
    "price",
    "favourite colour",
    "address",
    "birthplace",
)
STATEMENTS = (
    " The {attribute} of the {name} is {value}.",
    " Remember that the {attribute} of the {name} is {value}.",
    " Note: the {attribute} of the {name} is {value}.",
    " It was written down that the {attribute} of the {name} is {value}.",
)
FACT_QUESTION = "What is the {attribute} of the {name}?"
FACT_OPENING = "The {attribute} of the {name} is"
PROMPT = f"\nQuestion: {FACT_QUESTION}\nAnswer: {FACT_OPENING}"


@dataclass(frozen=True, slots=True)
class Fact:
    """The `attribute` of the `name` is `value`."""

    attribute: str
    name: str
    value: str

    def statement(self, template: str) -> str:
        return template.format(attribute=self.attribute, name=self.name, value=self.value)

    @property
    def question(self) -> str:
        return FACT_QUESTION.format(attribute=self.attribute, name=self.name)

    @property
    def opening(self) -> str:
        return FACT_OPENING.format(attribute=self.attribute, name=self.name)


def random_statement(rng: np.random.Generator, fact: Fact) -> str:
    """The fact in one of the wordings."""
    return fact.statement(STATEMENTS[int(rng.integers(len(STATEMENTS)))])


def random_phrase(rng: np.random.Generator, words: Sequence[str], least: int = 1, most: int = 3) -> str:
    """`least` to `most` words."""
    return " ".join(words[i] for i in rng.integers(0, len(words), int(rng.integers(least, most + 1))))


def random_attribute(rng: np.random.Generator) -> str:
    return ATTRIBUTES[int(rng.integers(len(ATTRIBUTES)))]


def random_number(rng: np.random.Generator) -> str:
    """Four to seven digits."""
    return "".join(str(d) for d in rng.integers(0, 10, int(rng.integers(4, 8))))


def random_value(rng: np.random.Generator, words: Sequence[str]) -> str:
    """A number six times in ten, one to three words otherwise."""
    return random_number(rng) if rng.random() < 0.6 else random_phrase(rng, words)


def random_fact(rng: np.random.Generator, words: Sequence[str]) -> Fact:
    """A fact whose name has one to three words."""
    name, attribute = random_phrase(rng, words), random_attribute(rng)
    return Fact(attribute, name, random_value(rng, words))


def make_facts(
    rng: np.random.Generator, words: Sequence[str], count: int, distractors: int = 0
) -> list[Fact]:
    """`count` facts to ask about, then `distractors` that share an attribute or a name with one of them.

    No two facts state the same attribute of the same name.
    """
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()
    while len(facts) < count + distractors:
        fact = random_fact(rng, words)
        if len(facts) >= count:
            near = facts[int(rng.integers(count))]
            fact = (
                Fact(near.attribute, fact.name, fact.value)
                if rng.random() < 0.5
                else Fact(fact.attribute, near.name, fact.value)
            )
        if (fact.attribute, fact.name) not in taken:
            taken.add((fact.attribute, fact.name))
            facts.append(fact)
    return facts


PROMPT_FORM = "\nQuestion: {question}\nAnswer: {opening}"
ANSWER_END = ".\n"
LIST_SEPARATOR = ", "


@dataclass(frozen=True, slots=True)
class Asked:
    """A question before it is known where its evidence stands.

    opening: what an answer begins with; the right continuation is a space and `answer`. evidence: which statements
    have to be read for it, as positions in `Draft.statements`.
    """

    question: str
    opening: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """statements: sentences, each with a leading space, in the order in which the document will hold them."""

    statements: tuple[str, ...]
    asked: tuple[Asked, ...]


class MakeDraft(Protocol):
    """Draws statements and questions.

    Everything follows from `rng`: whoever changes the order of its draws changes every document of the family.
    """

    def __call__(
        self, rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int
    ) -> Draft:
        """`questions` questions, with `distractors` statements that nobody asks about but that resemble others."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task.

    distractors: how many there are for each question unless asked otherwise. tokens_per_question: a document asks at
    most one question for as many of its tokens, so that the statements stay a small part of it.
    """

    name: str
    summary: str
    draft: MakeDraft
    distractors: int = 0
    tokens_per_question: int = 1

    def questions_in(self, tokens: int, wanted: int) -> int:
        """How many of the wanted questions a document of that many tokens has room for, at least one."""
        return max(1, min(wanted, tokens // self.tokens_per_question))


def places_of(order: Sequence[int] | np.ndarray) -> list[int]:
    """The inverse of a permutation: where each statement went when place j holds statement order[j]."""
    places = [0] * len(order)
    for place, statement in enumerate(order):
        places[int(statement)] = place
    return places


def draft_single(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """Facts to ask for, and distractors that share the attribute or the name with one of them."""
    return ask_each(rng, make_facts(rng, words, questions, distractors), questions)


def ask_each(rng: np.random.Generator, facts: Sequence[Fact], asked: int) -> Draft:
    """All facts in random order and wording, with a question about each of the first `asked`."""
    statements = [random_statement(rng, fact) for fact in facts]
    order = rng.permutation(len(facts))
    places = places_of(order)
    return Draft(
        tuple(statements[i] for i in order),
        tuple(
            Asked(fact.question, fact.opening, fact.value, (place,))
            for fact, place in zip(facts[:asked], places, strict=False)
        ),
    )


SINGLE = Family("single", "one fact among unrelated ones", draft_single)

AT_ONCE = 3


def draft_questions(
    rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int
) -> Draft:
    """As many facts as questions (AT_ONCE at least); every prompt asks for AT_ONCE of them, in random order.

    Each fact leads one prompt; the others of a prompt are drawn from all.
    """
    single = draft_single(rng, words, max(questions, AT_ONCE), distractors)
    asked = []
    for number in range(questions):
        others = [i for i in range(len(single.asked)) if i != number]
        chosen = [number, *(int(i) for i in rng.choice(others, AT_ONCE - 1, replace=False))]
        asked.append(_together([single.asked[i] for i in chosen]))
    return Draft(single.statements, tuple(asked))


def _together(asked: Sequence[Asked]) -> Asked:
    first, *rest = asked
    return Asked(
        " ".join(one.question for one in asked),
        first.opening,
        ". ".join([first.answer, *(f"{one.opening} {one.answer}" for one in rest)]),
        tuple(place for one in asked for place in one.evidence),
    )


QUESTIONS = Family(
    "questions", f"{AT_ONCE} facts asked for in one prompt, answered in order", draft_questions
)


def draft_keys(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """Facts about names of two or three words, and in turn another attribute of a name or a name one word away."""
    facts: list[Fact] = []
    taken: set[tuple[str, str]] = set()

    def add(attribute: str, name: str) -> None:
        if (attribute, name) not in taken:
            taken.add((attribute, name))
            facts.append(Fact(attribute, name, random_value(rng, words)))

    while len(facts) < questions:
        add(random_attribute(rng), random_phrase(rng, words, 2, 3))
    turn = 0
    while len(facts) < questions + distractors:
        near = facts[turn // 2 % questions]
        if turn % 2:
            add(random_attribute(rng), near.name)
        else:
            add(near.attribute, _one_word_away(rng, words, near.name))
        turn += 1
    return ask_each(rng, facts, questions)


def _one_word_away(rng: np.random.Generator, words: Sequence[str], name: str) -> str:
    parts = name.split()
    parts[int(rng.integers(len(parts)))] = words[int(rng.integers(len(words)))]
    return " ".join(parts)


KEYS = Family(
    "keys",
    "one fact among near misses: other attributes of the same name, and names that differ in one word",
    draft_keys,
    distractors=3,
    tokens_per_question=256,
)


VALUES = 4
VALUES_QUESTION = "What are all values of the {attribute} of the {name}, in order of appearance?"


def draft_values(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """VALUES statements for every question; the answer lists their values in the order of the text."""
    drawn = make_facts(rng, words, questions, distractors)
    subjects, others = drawn[:questions], drawn[questions:]
    facts = [
        Fact(subject.attribute, subject.name, value)
        for subject in subjects
        for value in _distinct_values(rng, words)
    ]
    statements = [random_statement(rng, fact) for fact in [*facts, *others]]
    order = rng.permutation(len(statements))
    places = places_of(order)
    asked = []
    for number, subject in enumerate(subjects):
        own = sorted(range(number * VALUES, (number + 1) * VALUES), key=places.__getitem__)
        asked.append(
            Asked(
                VALUES_QUESTION.format(attribute=subject.attribute, name=subject.name),
                subject.opening,
                LIST_SEPARATOR.join(facts[i].value for i in own),
                tuple(places[i] for i in own),
            )
        )
    return Draft(tuple(statements[i] for i in order), tuple(asked))


def _distinct_values(rng: np.random.Generator, words: Sequence[str]) -> list[str]:
    values: list[str] = []
    while len(values) < VALUES:
        value = random_value(rng, words)
        if value not in values:
            values.append(value)
    return values


VALUES_FAMILY = Family(
    "values",
    f"all {VALUES} values that one attribute of one name has, in order",
    draft_values,
    tokens_per_question=256,
)


LINKS = 4
SET = " The variable {name} is {value}."
COPY = " The variable {name} equals the variable {other}."


def draft_chain(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """One chain of LINKS variables for every question, its links in order at different depths.

    Every other question asks for the value of the last variable, the others for all variables that hold the value.
    Distractors are chains of one variable. Names are distinct words, values are distinct numbers.
    """
    count = questions * LINKS + distractors
    names = [words[i] for i in rng.choice(len(words), count, replace=count > len(words))]
    values: list[str] = []
    while len(values) < questions + distractors:
        value = random_number(rng)
        if value not in values:
            values.append(value)
    order = rng.permutation(count)
    places = places_of(order)
    statements = [""] * count
    asked = []
    for number in range(questions):
        chain = names[number * LINKS : (number + 1) * LINKS]
        own = tuple(sorted(places[number * LINKS : (number + 1) * LINKS]))
        statements[own[0]] = SET.format(name=chain[0], value=values[number])
        for place, name, other in zip(own[1:], chain[1:], chain[:-1], strict=True):
            statements[place] = COPY.format(name=name, other=other)
        asked.append(_chain_question(number, chain, values[number], own))
    for number in range(distractors):
        name, value = names[questions * LINKS + number], values[questions + number]
        statements[places[questions * LINKS + number]] = SET.format(name=name, value=value)
    return Draft(tuple(statements), tuple(asked))


def _chain_question(number: int, chain: Sequence[str], value: str, places: tuple[int, ...]) -> Asked:
    if number % 2:
        return Asked(
            f"Which variables hold {value}, in order of appearance?",
            f"The variables that hold {value} are",
            LIST_SEPARATOR.join(chain),
            places,
        )
    last = chain[-1]
    return Asked(f"What is the value of the variable {last}?", f"The variable {last} is", value, places)


CHAIN = Family(
    "chain",
    f"chains of {LINKS} variables set to one another: the value of the last one, or all that hold a value",
    draft_chain,
    tokens_per_question=256,
)


FREQUENT = (7, 5, 3)
"""How often the words that are asked for occur."""
RARE = 5
"""Further words that occur once each."""
PER_STATEMENT = 4
WORDS_STATEMENT = " The list of the {name} has {words}."
WORDS_QUESTION = "Which three words does the list of the {name} have most often, the most frequent one first?"
WORDS_OPENING = "The list of the {name} most often has"

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def draft_words(rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int) -> Draft:
    """One list for every question and distractor, given in parts of PER_STATEMENT words all over the text."""
    statements: list[str] = []
    subjects: list[tuple[str, list[str], range]] = []
    taken: set[str] = set()
    names: set[str] = set()
    while len(subjects) < questions + distractors:
        name = random_phrase(rng, words, 2, 3)
        if name in names:
            continue
        names.add(name)
        coded = [_coded_word(rng, taken) for _ in range(len(FREQUENT) + RARE)]
        counts = [*FREQUENT, *(1 for _ in range(RARE))]
        mentions = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        rng.shuffle(mentions)
        first = len(statements)
        for start in range(0, len(mentions), PER_STATEMENT):
            part = LIST_SEPARATOR.join(mentions[start : start + PER_STATEMENT])
            statements.append(WORDS_STATEMENT.format(name=name, words=part))
        subjects.append((name, coded[: len(FREQUENT)], range(first, len(statements))))
    order = rng.permutation(len(statements))
    places = places_of(order)
    asked = [
        Asked(
            WORDS_QUESTION.format(name=name),
            WORDS_OPENING.format(name=name),
            LIST_SEPARATOR.join(frequent),
            tuple(sorted(places[i] for i in own)),
        )
        for name, frequent, own in subjects[:questions]
    ]
    return Draft(tuple(statements[i] for i in order), tuple(asked))


def _coded_word(rng: np.random.Generator, taken: set[str]) -> str:
    """Consonants and vowels in turn, five letters, never the same twice."""
    while True:
        letters = (
            (_CONSONANTS, _VOWELS)[place % 2][int(rng.integers((len(_CONSONANTS), len(_VOWELS))[place % 2]))]
            for place in range(5)
        )
        word = "".join(letters)
        if word not in taken:
            taken.add(word)
            return word


WORDS = Family(
    "words",
    "the three most frequent of the made-up words that a list has, its parts all over the text",
    draft_words,
    tokens_per_question=1024,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Facts of one wording: the statement is `opening`, a space, a value and a full stop.

    "{name}" stands for one of NAMES, "{place}" for one of PLACES.
    """

    opening: str
    question: str
    values: tuple[str, ...]


NAMES = (
    "Alder", "Finch", "Tobias", "Crane", "Holloway", "Marsh", "Pettigrew", "Quill", "Rowntree", "Sorrel",
    "Thackeray", "Underhill", "Vickers", "Winslow", "Yardley", "Ashdown", "Bellamy", "Cartwright", "Dunmore", "Everett",
)  # fmt: skip
PLACES = (
    "Norbury", "Harwell", "Castleford", "Dunwich", "Elmstead", "Farleigh", "Greystone", "Hexham", "Ironbridge", "Kelso",
    "Lowick", "Malden", "Netherby", "Oakham", "Penrith", "Ripley", "Selborne", "Thornton", "Uppingham", "Whitby",
)  # fmt: skip
_CITIES = ("Lisbon", "Vienna", "Cairo", "Prague", "Dublin", "Athens", "Geneva", "Naples")
_THINGS = (
    "kitchen clock",
    "red curtain",
    "copper kettle",
    "tall mirror",
    "bookcase",
    "flower pot",
    "oak door",
)

KINDS = (
    Kind(
        "{name}'s dog was called",
        "What was {name}'s dog called?",
        ("Bramble", "Pepper", "Nettle", "Biscuit", "Rufus"),
    ),
    Kind(
        "Mrs {name} bought the piano for",
        "For how much did Mrs {name} buy the piano?",
        ("forty shillings", "nine pounds", "sixty guineas", "three crowns"),
    ),
    Kind(
        "The {name} family's cellar key hung behind the",
        "Where did the {name} family's cellar key hang?",
        _THINGS,
    ),
    Kind(
        "The ferry to {place} left at",
        "When did the ferry to {place} leave?",
        ("half past six", "noon", "a quarter to nine", "midnight", "ten past four"),
    ),
    Kind(
        "Doctor {name} kept a tame",
        "Which tame animal did Doctor {name} keep?",
        ("parrot", "otter", "raven", "hedgehog", "monkey"),
    ),
    Kind(
        "The roof of the schoolhouse at {place} was painted",
        "What colour was the roof of the schoolhouse at {place}?",
        ("green", "yellow", "purple", "white", "orange"),
    ),
    Kind("Old {name} had been born in", "Where had old {name} been born?", _CITIES),
    Kind(
        "Miss {name} played the",
        "Which instrument did Miss {name} play?",
        ("violin", "flute", "harp", "trumpet", "cello"),
    ),
    Kind(
        "The password at the {place} club was",
        "What was the password at the {place} club?",
        ("marmalade", "swordfish", "buttercup", "thunder", "elephant"),
    ),
    Kind(
        "Captain {name} was afraid of",
        "What was Captain {name} afraid of?",
        ("moths", "spiders", "the dark", "geese", "lightning"),
    ),
    Kind(
        "The winning horse at the {place} fair was named",
        "What was the winning horse at the {place} fair named?",
        ("Copper Penny", "Grey Lady", "Midnight Sun", "Lucky Star", "Wild Rose"),
    ),
    Kind(
        "The baker {name} seasoned every loaf with",
        "With what did the baker {name} season every loaf?",
        ("nutmeg", "rosemary", "saffron", "cinnamon", "fennel"),
    ),
    Kind(
        "The stolen painting from {place} showed a",
        "What did the stolen painting from {place} show?",
        ("windmill at dusk", "sleeping lion", "bowl of cherries", "burning ship", "snowy mountain"),
    ),
    Kind(
        "In the river the postman {name} had lost his",
        "What had the postman {name} lost in the river?",
        ("left boot", "spectacles", "pocket watch", "umbrella", "walking stick"),
    ),
    Kind(
        "The best room of the hotel at {place} was number",
        "What was the number of the best room of the hotel at {place}?",
        ("214", "37", "509", "122", "86"),
    ),
    Kind(
        "The ship that sailed from {place} was named the",
        "What was the name of the ship that sailed from {place}?",
        ("Silver Heron", "Black Swan", "Golden Hind", "Morning Star", "Sea Otter"),
    ),
    Kind(
        "The gardener {name} buried the treasure under the",
        "Where did the gardener {name} bury the treasure?",
        ("pear tree", "old well", "rose bushes", "stone bench", "garden shed"),
    ),
    Kind(
        "Mayor {name}'s favourite dish was",
        "What was Mayor {name}'s favourite dish?",
        ("pigeon pie", "onion soup", "roast goose", "plum pudding", "smoked eel"),
    ),
    Kind(
        "The clockmaker {name} worked on the tower clock for",
        "How long did the clockmaker {name} work on the tower clock?",
        ("eleven years", "six weeks", "nineteen months", "three winters", "forty days"),
    ),
    Kind(
        "The bridge at {place} was built by",
        "Who built the bridge at {place}?",
        ("Samuel Crane", "Edwin Marlow", "Arthur Pell", "Josiah Webb", "Hugh Latimer"),
    ),
    Kind(
        "The telegram from {place} arrived on a",
        "On which day did the telegram from {place} arrive?",
        ("Thursday", "Monday", "Saturday", "Tuesday", "Sunday"),
    ),
    Kind(
        "The widow {name}'s house stood beside the",
        "Where did the widow {name}'s house stand?",
        ("tannery", "railway station", "brewery", "old chapel", "fish market"),
    ),
    Kind(
        "The conductor of the {place} orchestra came from",
        "Where did the conductor of the {place} orchestra come from?",
        _CITIES,
    ),
    Kind(
        "The chemist {name} kept the poison in a",
        "In what did the chemist {name} keep the poison?",
        ("blue jar", "tin box", "glass bottle", "leather bag", "wooden drawer"),
    ),
)
_SUBJECTS = min(len(NAMES), len(PLACES))


def draft_sentences(
    rng: np.random.Generator, words: Sequence[str], questions: int, distractors: int
) -> Draft:
    """Every wording once before any comes again, then with another name; `words` are not used.

    A distractor is a further fact in the wording of one that is asked for. Raises InvalidArgumentError when a wording
    has no name left.
    """
    order = rng.permutation(len(KINDS))
    subjects = [list(rng.permutation(_SUBJECTS)) for _ in KINDS]
    statements: list[str] = []
    asked: list[tuple[str, str, str]] = []
    for number in range(questions + distractors):
        kind = int(order[number % questions % len(KINDS)])
        if not subjects[kind]:
            raise InvalidArgumentError(
                f"task 'sentences' is out of names after {number} of {questions} facts and {distractors} distractors; "
                f"it has {_SUBJECTS} facts in each of {len(KINDS)} wordings"
            )
        wording, subject = KINDS[kind], int(subjects[kind].pop())
        named = {"name": NAMES[subject], "place": PLACES[subject]}
        value = wording.values[int(rng.integers(len(wording.values)))]
        opening = wording.opening.format(**named)
        statements.append(f" {opening} {value}.")
        if number < questions:
            asked.append((wording.question.format(**named), opening, value))
    shuffled = rng.permutation(len(statements))
    places = places_of(shuffled)
    return Draft(
        tuple(statements[i] for i in shuffled),
        tuple(Asked(*one, (place,)) for one, place in zip(asked, places, strict=False)),
    )


SENTENCES = Family("sentences", "one everyday fact, asked for in everyday words", draft_sentences)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (SINGLE, KEYS, VALUES_FAMILY, QUESTIONS, CHAIN, WORDS, SENTENCES)}
)


def get_family(name: str) -> Family:
    """The named family. Raises InvalidArgumentError for an unknown name."""
    family = FAMILIES.get(name)
    if family is None:
        raise InvalidArgumentError(f"task is {name!r}, expected one of {', '.join(FAMILIES)}", task=name)
    return family
