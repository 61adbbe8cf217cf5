"""Task `sentences`: one everyday fact in a long text, asked for in the words of everyday.

For models that were trained on what people write: their questions are worded differently from one another, their
names and values are ordinary. A small model of that kind takes the facts of `single`, of which every one is "the
password of the sparkling drum is 4821", for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode_engine.evaluation.tasks.family import Asked, Draft, Family, places_of
from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


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
