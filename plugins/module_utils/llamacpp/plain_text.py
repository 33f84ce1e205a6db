# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plain text, written for this collection, that is sent to models to check them. Changing it invalidates earlier measurements."""

PARAGRAPHS = (
    """The old mill stands where the river bends, just below the village. In spring the water rises over the meadow, and the miller has to open both
gates before the wheel starts to turn. His grandfather built the wheel from oak, and every winter he replaced three or four of its boards. Today a small
generator hangs beside it. It makes enough electricity for the house, the barn and the street lamps on the bridge.""",
    """On Saturday mornings the children of the village carry their grain to the mill. They stand in a line, tell jokes and wait until the stones are
warm. When the flour comes out, it smells of nuts and summer. Each child pays with a small coin or with an egg. The miller writes the names into a thick
book, because in autumn he gives a loaf of bread to everyone who came at least ten times.""",
    """A computer is a machine that follows instructions. It does not know what the instructions are for, and it never gets tired of them. If you ask it
to add two numbers, it adds them in less than a millionth of a second. If you ask it to read a book, it counts the letters, compares the words and guesses
which word comes next. People were surprised when they found out how much can be done by guessing the next word well.""",
    """To bake a simple bread you need five hundred grams of flour, three hundred grams of water, ten grams of salt and a little yeast. Mix everything in
a large bowl, cover it with a cloth and let it rest for an hour. Then fold the dough, turn it around and fold it again. After another hour it has doubled in
size. Bake it for forty minutes in a hot oven. The bread is done if it sounds hollow when you knock on it.""",
    """The train left the station at half past seven. Anna had found a seat by the window, and she watched the city become smaller. First came the tall
houses, then the gardens, then the fields with their long rows of young trees. Across from her a man was reading a newspaper from the day before. He turned
the pages slowly, as if he wanted to remember all of it. At the third stop he folded the paper, said good morning and got off.""",
    """Water boils at one hundred degrees at sea level. On a high mountain it boils earlier, because the air presses less on its surface. That is why
potatoes take longer to cook there, although the water looks just as wild. Salt changes this a little, but not as much as many people believe. A lid on the
pot helps far more, since most of the heat escapes upwards with the steam.""",
)
TEXT = "\n\n".join(" ".join(paragraph.split()) for paragraph in PARAGRAPHS)
