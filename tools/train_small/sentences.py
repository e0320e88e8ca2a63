"""What the small model is trained to say: matrix sentences, which a recognizer can score, and free English."""

import random
import re
import zlib

SLOTS = [
    "peter rachel steven nina thomas lucy alan doris william kathy".split(),
    "got sees bought gives sold prefers has kept ordered wants".split(),
    "three nine five eight four six two ten seven twelve".split(),
    "large small old dark thin green cheap pretty red white".split(),
    "desks chairs tables toys spoons windows sofas rings flowers houses".split(),
]
"""A matrix sentence has one word of each: name, verb, number, adjective, object; 100,000 sentences."""

_HELD_OUT = 20
"""One sentence in so many is never trained on."""

_PEOPLE = (
    SLOTS[0]
    + """anna ben clara daniel emma frank grace henry irene jack laura martin nora oscar paul rosa simon tina
    victor wendy""".split()
)
_SUBJECTS = """the teacher|the doctor|the farmer|my brother|my sister|her mother|his father|our neighbour|the driver
    |the captain|the baker|a young woman|an old man|the children|the students|the workers|the player|the artist
    |the lawyer|the nurse|the cook|a friend of mine|the little girl|the boy next door|the guests|most people|nobody
    |everyone|somebody|the company|the committee|the family"""
_THINGS = """a letter|the window|the garden|a bicycle|the kitchen|a new coat|the newspaper|an apple|some bread
    |a bottle of milk|the old bridge|a cup of tea|the map|a wooden box|the key|his answer|her question|a short story
    |the picture|two tickets|a warm blanket|the radio|a birthday cake|the piano|a pair of shoes|fresh flowers
    |the last train|a good idea|the whole house|my umbrella|a bowl of soup|the red door|three lemons|the clock
    |an empty chair|the report|a glass of water|a loaf of bread|the silver ring|a blue shirt"""
_PAST = """found|opened|cleaned|painted|carried|remembered|forgot|lost|brought|showed us|looked at|asked for|broke
    |mended|bought|sold|watched|wanted|needed|noticed|described|picked up|put away|paid for|talked about|hid|drew
    |returned|borrowed|finished|dropped|liked|moved|covered|kept"""
_PLACES = """in the garden|at the station|on the table|behind the house|near the river|in the city|at school
    |by the sea|under the bridge|in the market|at home|on the hill|in the library|across the street|in the forest
    |at the office|on the train|beside the lake|in the north|upstairs|outside|over there|on the second floor"""
_TIMES = """yesterday|this morning|last night|on Monday|in the evening|before lunch|after the concert|every day|at noon
    |two days ago|in the winter|last summer|at the weekend|an hour ago|on Friday|once a year|in spring|again|at last
    |too late|very early"""
_ADJECTIVES = """cold|warm|quiet|bright|heavy|empty|beautiful|difficult|strange|perfect|dry|sweet|narrow|round|famous
    |modern|dangerous|simple|clean|expensive|wonderful|open|closed|wet|long|short|soft|broken|ready|late|full|clear
    |very small|quite new|rather dark|much too loud|almost white|green|far away"""
_NOUNS = """weather|water|road|room|house|river|music|train|story|morning|sky|street|bread|coffee|village|mountain|cat
    |dog|horse|garden|shop|museum|church|wind|snow|rain|light|film|book|question|answer|soup|shirt|table|bridge|door
    |moon|winter|summer|school|problem|plan|game|party|journey|song"""
_ACTIONS = """go home|wait here|call the doctor|close the door|come with us|try again|read the letter|buy some milk
    |take the bus|ask your sister|write it down|turn on the light|leave tomorrow|learn a language|sing a song
    |play the piano|cook the dinner|find the key|open the window|start the engine|feed the cat|watch the game
    |wash the dishes|cross the river|sit down|speak more slowly|help your father|visit the museum|eat something
    |drink some water|stay for a week|pay the bill|answer the phone|catch the train|look at the map|tell me a story"""
_GOING = """walked|ran|drove|went|came back|travelled|hurried|sailed|returned|moved|flew|rode slowly"""
_WHERE = """to the station|to the market|into the forest|along the river|across the bridge|up the hill|to the village
    |through the park|around the lake|home|towards the sea|past the church|down the street|from the north
    |to the library|out of the house"""
_OPENINGS = "hello|good morning|good evening|thank you|excuse me|I am sorry|of course|no problem|yes please|well|oh no"
_NUMBERS = "two three four five six seven eight nine ten eleven twelve twenty thirty fifty hundred".split()
_COUNTED = """apples|books|boats|birds|people|horses|letters|stones|trees|streets|minutes|miles|days|bottles|windows
    |stories|songs|pictures|islands|chairs|lamps|dogs|shoes|coins|bridges|questions|pages|stars|eggs|plates|trains"""
_TEMPLATES = """{subject} {past} {thing}|{subject} {past} {thing} {place}|{time} {person} {past} {thing}
    |{person} {past} {thing} {time}|the {noun} was {adjective}|the {noun} is {adjective} {place}
    |the {noun} is {adjective} and {adjective}|is the {noun} {adjective}|why is the {noun} so {adjective}
    |where did {person} find {thing}|please {action}|{person}, please {action}|we will {action} {time}
    |can you {action}|I would like to {action}|do not {action}|let us {action}|{opening}, {person}
    |{opening}, the {noun} is {adjective}|they {going} {where}|{subject} {going} {where}|{person} {going} {where} {time}
    |there are {number} {counted} {place}|{person} has {number} {counted}|{number} {counted} are not enough
    |it was a {adjective} {noun}|what a {adjective} {noun}|I think that {subject} {past} {thing}
    |{person} and {person} {going} {where}|if the {noun} is {adjective}, {action}|she said the {noun} was {adjective}
    |he told me to {action}|how many {counted} are there|you should {action}|there is {thing} {place}
    |the {noun} and the {noun} are {adjective}|{thing} is {place}|who {past} {thing}|{opening}|when can we {action}"""


def _choices(words: str) -> list[str]:
    return [" ".join(choice.split()) for choice in words.split("|")]


_WORDS = {
    "person": _PEOPLE,
    "subject": _choices(_SUBJECTS),
    "thing": _choices(_THINGS),
    "past": _choices(_PAST),
    "place": _choices(_PLACES),
    "time": _choices(_TIMES),
    "adjective": _choices(_ADJECTIVES),
    "noun": _choices(_NOUNS),
    "action": _choices(_ACTIONS),
    "going": _choices(_GOING),
    "where": _choices(_WHERE),
    "opening": _choices(_OPENINGS),
    "number": _NUMBERS,
    "counted": _choices(_COUNTED),
}
_FORMS = _choices(_TEMPLATES)
_TWO_CLAUSES = 0.3
_JOINTS = [", and ", ", but ", " because ", " and then ", " when ", ", so "]


def is_held_out(sentence: str) -> bool:
    """Whether a sentence is kept for testing."""
    return zlib.crc32(sentence.encode()) % _HELD_OUT == 0


def is_matrix(sentence: str) -> bool:
    words = sentence.split()
    return len(words) == len(SLOTS) and all(word in slot for word, slot in zip(words, SLOTS, strict=True))


def matrix_sentence(rng: random.Random, held_out: bool) -> str:
    """A matrix sentence, lower case, of those that are trained on or of those that are not."""
    while True:
        sentence = " ".join(rng.choice(slot) for slot in SLOTS)
        if is_held_out(sentence) == held_out:
            return sentence


def free_sentence(rng: random.Random, held_out: bool) -> str:
    """English out of templates, one clause or two; lower case but for "I" and "Monday", without a full stop."""
    while True:
        sentence = _clause(rng)
        if rng.random() < _TWO_CLAUSES:
            sentence += rng.choice(_JOINTS) + _clause(rng)
        if is_held_out(sentence) == held_out:
            return sentence


def _clause(rng: random.Random) -> str:
    form = rng.choice(_FORMS)
    while "{" in form:
        before, _, rest = form.partition("{")
        name, _, after = rest.partition("}")
        form = before + rng.choice(_WORDS[name]) + after
    return re.sub(r"\ba (?=[aeiou])", "an ", form)
