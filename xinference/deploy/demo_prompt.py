"""A long prompt that nobody has ever sent before: sentences drawn from a small vocabulary by a seed. Pure."""

import random
from typing import Final

SUBJECTS: Final = (
    "The harbour",
    "A lighthouse",
    "The old mill",
    "Our library",
    "The night train",
    "A narrow bridge",
    "The market",
    "A field station",
)
VERBS: Final = ("keeps", "lends", "repairs", "counts", "carries", "measures", "stores", "sorts", "sends", "collects")
OBJECTS: Final = (
    "lanterns",
    "maps",
    "letters",
    "barrels",
    "clocks",
    "seeds",
    "ropes",
    "kettles",
    "samples",
    "bicycles",
    "tiles",
    "violins",
)
PLACES: Final = (
    "by the river",
    "behind the hill",
    "near the square",
    "on the island",
    "under the arches",
    "along the canal",
    "at the border",
)
TIMES: Final = ("before dawn", "every second day", "until the first frost", "after the rain", "in late summer", "when the tide is low")


def long_text(seed: int, num_sentences: int) -> str:
    """Deterministic text. Its first words come from the seed, so that two seeds do not share even their first block."""
    draw = random.Random(seed)  # noqa: S311 (a prompt, not a secret)
    sentences = [f"Report {seed:016x}."]
    for number in range(1, num_sentences + 1):
        words = (draw.choice(SUBJECTS), draw.choice(VERBS), str(draw.randrange(2, 9000)), draw.choice(OBJECTS), draw.choice(PLACES))
        sentences.append(f"{number}. {' '.join(words)} {draw.choice(TIMES)}.")
    return " ".join(sentences)
