"""Short chat: greetings, thanks, capitals, definitions, small facts, and "I don't know" for what nobody can know."""

from __future__ import annotations

from random import Random

from dsparkd.text.encoding import Turn
from tools.train_nano.tasks.example import Candidate, Example, Split, pick, split_of
from tools.train_nano.tasks.setting import draw_setting
from tools.train_nano.tasks.words import COUNTRIES, NAMES, NOUNS, phrases, words

UNKNOWN = "I don't know."

_GREETINGS = phrases(
    "Hello|Hi|Hey|Good morning|Good evening|Hello there|Hi there|Good day|Hey there|Greetings|Good afternoon|"
    "Hello again"
)
_THANKS = phrases(
    "Thanks|Thank you|Thanks a lot|Thank you very much|Many thanks|Great, thanks|Thanks again|Perfect, thank you|"
    "That helps, thanks|Thank you so much"
)
_FAREWELLS = phrases(
    "Bye|Goodbye|See you|See you later|Good night|Bye for now|Have a nice day|Bye bye|See you tomorrow"
)
_MOODS = phrases("How are you?|How are you today?|How is it going?|How do you do?|Are you well?|Are you fine?")
_SELVES = phrases(
    "Who are you?|What are you?|What is your name?|Are you a person?|What can you do?|Are you a machine?|"
    "Are you a robot?|What are you good at?"
)

HELLO = "Hello! How can I help you?"
WELCOME = "You're welcome!"
FAREWELL = "Goodbye!"
MOOD = "I'm fine, thank you. How can I help you?"
SELF = "I'm a small language model. I can do sums, copy lists, find facts in texts and call tools."

_CAPITALS = (
    "What is the capital of {x}?",
    "Which city is the capital of {x}?",
    "Tell me the capital of {x}.",
    "Name the capital of {x}.",
    "capital of {x}?",
    "Do you know the capital of {x}?",
    "I would like to know the capital of {x}.",
    "What's the capital of {x}?",
)
_COUNTRY_OF = (
    "{x} is the capital of which country?",
    "Which country has the capital {x}?",
    "Of which country is {x} the capital?",
)
_DEFINITIONS_ASKED = (
    "What is {x}?",
    "Define {x}.",
    "Explain {x} in one sentence.",
    "What does {x} mean?",
    "Can you tell me what {x} is?",
    "Tell me what {x} is.",
)
DEFINITIONS = {
    "a verb": "A verb is a word for an action or a state.",
    "a noun": "A noun is a word for a person, a place or a thing.",
    "an adjective": "An adjective is a word that describes a noun.",
    "a sentence": "A sentence is a group of words that says something complete.",
    "a synonym": "A synonym is a word that means the same as another word.",
    "an antonym": "An antonym is a word that means the opposite of another word.",
    "an alphabet": "An alphabet is the set of letters of a language.",
    "a dictionary": "A dictionary is a book that explains words.",
    "a novel": "A novel is a long story in a book.",
    "a poem": "A poem is a short text with rhythm and images.",
    "a library": "A library is a place where people read and borrow books.",
    "a museum": "A museum is a place that shows old or valuable things.",
    "a school": "A school is a place where children learn.",
    "a hospital": "A hospital is a place where sick people are treated.",
    "a market": "A market is a place where people buy and sell things.",
    "a bakery": "A bakery is a shop that makes and sells bread.",
    "a bridge": "A bridge is a way over a river or a road.",
    "a tunnel": "A tunnel is a way under the ground.",
    "a harbor": "A harbor is a place where ships are safe.",
    "an airport": "An airport is a place where planes start and land.",
    "a river": "A river is a long stream of water that flows to a sea or a lake.",
    "a lake": "A lake is water with land all around it.",
    "an ocean": "An ocean is a very large body of salt water.",
    "an island": "An island is land with water all around it.",
    "a desert": "A desert is a dry place with little rain.",
    "a forest": "A forest is a large area with many trees.",
    "a mountain": "A mountain is a very high hill.",
    "a valley": "A valley is low land between hills.",
    "a volcano": "A volcano is a mountain that can throw out hot rock.",
    "a glacier": "A glacier is a slow river of ice.",
    "a beach": "A beach is sand or stones beside the sea.",
    "water": "Water is a clear liquid that all living things need.",
    "ice": "Ice is water that is frozen.",
    "steam": "Steam is water in the form of a hot gas.",
    "snow": "Snow is frozen water that falls in white flakes.",
    "rain": "Rain is water that falls from clouds.",
    "wind": "Wind is air that moves.",
    "fog": "Fog is a cloud close to the ground.",
    "thunder": "Thunder is the loud sound after lightning.",
    "lightning": "Lightning is a bright flash of electricity in the sky.",
    "a cloud": "A cloud is a mass of small drops of water in the sky.",
    "a star": "A star is a large ball of hot gas in space.",
    "a planet": "A planet is a large body that moves around a star.",
    "the sun": "The sun is the star at the center of our solar system.",
    "the moon": "The moon is the body that moves around the earth.",
    "a comet": "A comet is a body of ice and dust with a bright tail.",
    "gravity": "Gravity is the force that pulls things to each other.",
    "energy": "Energy is the ability to do work.",
    "a magnet": "A magnet is a thing that attracts iron.",
    "electricity": "Electricity is a form of energy that flows through wires.",
    "a battery": "A battery is a thing that stores electric energy.",
    "a computer": "A computer is a machine that works with data.",
    "a program": "A program is a list of instructions for a computer.",
    "a byte": "A byte is a group of eight bits.",
    "a bit": "A bit is the smallest unit of data, zero or one.",
    "a server": "A server is a computer that answers requests of others.",
    "a browser": "A browser is a program that shows web pages.",
    "a password": "A password is a secret word that opens an account.",
    "a keyboard": "A keyboard is a set of keys for typing.",
    "a robot": "A robot is a machine that can move and work by itself.",
    "a camera": "A camera is a device that takes pictures.",
    "a clock": "A clock is a device that shows the time.",
    "a compass": "A compass is a device that shows where north is.",
    "a thermometer": "A thermometer is a device that measures temperature.",
    "a telescope": "A telescope is a device that makes far things look near.",
    "a microscope": "A microscope is a device that makes small things look large.",
    "a map": "A map is a drawing of a place from above.",
    "a triangle": "A triangle is a shape with three sides.",
    "a square": "A square is a shape with four equal sides and right angles.",
    "a circle": "A circle is a round shape with all points at the same distance from its center.",
    "a cube": "A cube is a solid with six equal square sides.",
    "a sphere": "A sphere is a solid that is round like a ball.",
    "an angle": "An angle is the space between two lines that meet.",
    "a fraction": "A fraction is a part of a whole number.",
    "an even number": "An even number is a number that can be divided by two.",
    "an odd number": "An odd number is a number that cannot be divided by two.",
    "a prime number": "A prime number is a number that only one and itself divide.",
    "a sum": "A sum is the result of adding numbers.",
    "a product": "A product is the result of multiplying numbers.",
    "an average": "An average is a sum divided by the count of its numbers.",
    "a mammal": "A mammal is an animal that feeds its young with milk.",
    "a bird": "A bird is an animal with feathers and wings.",
    "a fish": "A fish is an animal that lives in water and breathes through gills.",
    "an insect": "An insect is a small animal with six legs.",
    "a reptile": "A reptile is an animal with dry skin and scales.",
    "a spider": "A spider is a small animal with eight legs.",
    "a plant": "A plant is a living thing that makes food from light.",
    "a tree": "A tree is a tall plant with a wooden trunk.",
    "a flower": "A flower is the part of a plant that makes seeds.",
    "a seed": "A seed is the small part from which a plant grows.",
    "a fruit": "A fruit is the part of a plant that holds its seeds.",
    "a vegetable": "A vegetable is a plant that people cook and eat.",
    "bread": "Bread is a food made of flour and water.",
    "cheese": "Cheese is a food made of milk.",
    "honey": "Honey is a sweet food that bees make.",
    "salt": "Salt is a white mineral that gives food its taste.",
    "glass": "Glass is a hard clear material made of sand.",
    "paper": "Paper is a thin material made of wood.",
    "steel": "Steel is a strong metal made of iron and carbon.",
    "gold": "Gold is a yellow metal that is rare.",
    "wool": "Wool is the hair of sheep.",
    "the heart": "The heart is the organ that moves blood through the body.",
    "the brain": "The brain is the organ with which we think.",
    "a lung": "A lung is an organ with which we breathe.",
    "a doctor": "A doctor is a person who treats sick people.",
    "a teacher": "A teacher is a person who helps others to learn.",
    "a farmer": "A farmer is a person who grows food.",
    "a pilot": "A pilot is a person who flies a plane.",
    "a baker": "A baker is a person who makes bread.",
    "a neighbor": "A neighbor is a person who lives next to you.",
    "a friend": "A friend is a person whom you like and trust.",
    "an invoice": "An invoice is a bill for goods or work.",
    "a contract": "A contract is an agreement that binds two sides.",
    "a century": "A century is a time of one hundred years.",
    "a decade": "A decade is a time of ten years.",
    "an hour": "An hour is a time of sixty minutes.",
    "a leap year": "A leap year is a year of 366 days.",
}
_FACTS = {
    "How many days are in a week?": "A week has 7 days.",
    "How many months are in a year?": "A year has 12 months.",
    "How many hours are in a day?": "A day has 24 hours.",
    "How many minutes are in an hour?": "An hour has 60 minutes.",
    "How many seconds are in a minute?": "A minute has 60 seconds.",
    "How many days are in a year?": "A year has 365 days, a leap year 366.",
    "How many weeks are in a year?": "A year has 52 weeks.",
    "How many legs does a spider have?": "A spider has 8 legs.",
    "How many legs does an insect have?": "An insect has 6 legs.",
    "How many legs does a dog have?": "A dog has 4 legs.",
    "How many sides does a triangle have?": "A triangle has 3 sides.",
    "How many sides does a hexagon have?": "A hexagon has 6 sides.",
    "How many sides does a square have?": "A square has 4 sides.",
    "How many letters are in the English alphabet?": "The English alphabet has 26 letters.",
    "How many bits are in a byte?": "A byte has 8 bits.",
    "How many cents are in a dollar?": "A dollar has 100 cents.",
    "How many meters are in a kilometer?": "A kilometer has 1000 meters.",
    "How many grams are in a kilogram?": "A kilogram has 1000 grams.",
    "How many centimeters are in a meter?": "A meter has 100 centimeters.",
    "How many continents are there?": "There are 7 continents.",
    "How many oceans are there?": "There are 5 oceans.",
    "How many planets are in the solar system?": "The solar system has 8 planets.",
    "How many strings does a violin have?": "A violin has 4 strings.",
    "How many colors does a rainbow have?": "A rainbow has 7 colors.",
    "How many players are in a football team?": "A football team has 11 players on the field.",
    "Which is the largest planet?": "Jupiter is the largest planet of the solar system.",
    "Which planet is closest to the sun?": "Mercury is the planet closest to the sun.",
    "Which planet is called the red planet?": "Mars is called the red planet.",
    "Which is the largest ocean?": "The Pacific is the largest ocean.",
    "Which is the longest river in Africa?": "The Nile is the longest river in Africa.",
    "Which is the highest mountain?": "Mount Everest is the highest mountain.",
    "Which is the largest animal?": "The blue whale is the largest animal.",
    "Which is the fastest land animal?": "The cheetah is the fastest land animal.",
    "Which is the tallest animal?": "The giraffe is the tallest animal.",
    "Which metal is liquid at room temperature?": "Mercury is liquid at room temperature.",
    "Which gas do we need to breathe?": "We need oxygen to breathe.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What color is the sky on a clear day?": "The sky is blue on a clear day.",
    "What color is grass?": "Grass is green.",
    "What color is snow?": "Snow is white.",
    "What do bees make?": "Bees make honey.",
    "What do cows drink?": "Cows drink water.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is the opposite of big?": "The opposite of big is small.",
    "What is the opposite of day?": "The opposite of day is night.",
    "What is the opposite of up?": "The opposite of up is down.",
    "What is the opposite of open?": "The opposite of open is closed.",
    "What is the opposite of fast?": "The opposite of fast is slow.",
    "What is the opposite of old?": "The opposite of old is new.",
    "What is the opposite of wet?": "The opposite of wet is dry.",
    "What is the plural of mouse?": "The plural of mouse is mice.",
    "What is the plural of child?": "The plural of child is children.",
    "What is the plural of foot?": "The plural of foot is feet.",
    "What comes after Monday?": "Tuesday comes after Monday.",
    "What comes after Friday?": "Saturday comes after Friday.",
    "What comes after March?": "April comes after March.",
    "What comes after December?": "January comes after December.",
    "Which is the first month of the year?": "January is the first month of the year.",
    "Which is the last month of the year?": "December is the last month of the year.",
    "Which is the first letter of the alphabet?": "A is the first letter of the alphabet.",
    "Which is the last letter of the alphabet?": "Z is the last letter of the alphabet.",
}
_PREFIXES = (
    *("",) * 13,
    "Please tell me: ",
    "A question: ",
    "Do you know this? ",
    "Quick question: ",
    "Tell me: ",
    "I wonder: ",
    "Hello! ",
    "Well, ",
    "One more thing: ",
)
_SUBJECTS = tuple(DEFINITIONS)
_FACTS_ASKED = tuple(_FACTS)
_UNKNOWABLE = (
    "What did {n} eat yesterday?",
    "Who will win the game tomorrow?",
    "What is the phone number of {n}?",
    "How much money does {n} have?",
    "What am I thinking of?",
    "What will the weather be next year in {x}?",
    "Which number will be drawn next week?",
    "Where did {n} put the keys?",
)
_STARTS = words("Zor Bel Kra Vun Mel Tar Quo Dra Fel Nim Lor Gry Os Ul Pra")
_ENDS = words("via land mia donia stan onia ora ith undia esia avia")


def candidate(rng: Random, split: Split) -> Candidate:
    """Draw a question with its answer, sometimes after others of the same split."""
    template, ask, reply, thought = _exchange(rng)

    def build() -> Example:
        setting = draw_setting(rng)
        turns: list[Turn] = []
        for _ in range(pick(rng, (0, 0, 0, 0, 0, 1, 1, 2))):
            other, other_reply = _past(rng, split)
            turns += [Turn("user", other), Turn("assistant", other_reply)]
        turns.append(Turn("user", ask))
        answer = setting.answer(thought, reply)
        return Example("chat", setting.chat(turns), None, answer, reply, history_is_answer=not setting.thinking)

    return Candidate(f"{template}:{ask}", build)


def _past(rng: Random, split: Split) -> tuple[str, str]:
    """Draw what was asked and answered before."""
    while True:
        template, ask, reply, _ = _exchange(rng)
        if split_of("chat", f"{template}:{ask}") == split:
            return ask, reply


_SMALL_TALK = (
    (_GREETINGS, HELLO, "The user greets me."),
    (_THANKS, WELCOME, "The user thanks me."),
    (_FAREWELLS, FAREWELL, "The user leaves."),
    (_MOODS, MOOD, "The user asks how I am."),
    (_SELVES, SELF, "The user asks about me."),
)
Exchange = tuple[str, str, str, str]  # template, question, answer, thought


def _exchange(rng: Random) -> Exchange:
    kind = rng.random()
    if kind < 0.25:
        return _small_talk(rng)
    if kind < 0.5:
        template, ask, reply, thought = _capital(rng)
    elif kind < 0.75:
        subject = pick(rng, _SUBJECTS)
        template, reply, thought = "definition", DEFINITIONS[subject], f"I define {subject}."
        ask = pick(rng, _DEFINITIONS_ASKED).format(x=subject)
    elif kind < 0.85:
        ask = pick(rng, _FACTS_ASKED)
        template, reply, thought = "fact", _FACTS[ask], "This is a known fact."
    else:
        template, ask, reply, thought = _unknown(rng)
    return template, _sloppy(rng, pick(rng, _PREFIXES) + ask), reply, thought


def _sloppy(rng: Random, ask: str) -> str:
    """Now and then begin with a small letter or leave out the mark at the end."""
    kind = rng.random()
    if kind < 0.08:
        return ask[0].lower() + ask[1:]
    return ask[:-1] if kind < 0.14 else ask


def _small_talk(rng: Random) -> Exchange:
    asks, reply, thought = pick(rng, _SMALL_TALK)
    ask = pick(rng, asks)
    if ask.endswith("?"):
        ask = pick(rng, _PREFIXES) + ask
    else:
        ask += pick(rng, (".", "!", "", f", {pick(rng, NAMES)} here."))
    return "talk", ask, reply, thought


def _capital(rng: Random) -> Exchange:
    country, capital = pick(rng, COUNTRIES)
    if rng.random() < 0.3:
        ask = pick(rng, _COUNTRY_OF).format(x=capital)
        return "country", ask, f"{capital} is the capital of {country}.", f"I know the city {capital}."
    ask = pick(rng, _CAPITALS).format(x=country)
    return "capital", ask, f"The capital of {country} is {capital}.", "I know this country."


def _unknown(rng: Random) -> Exchange:
    place = pick(rng, _STARTS) + pick(rng, _ENDS)
    kind = rng.random()
    if kind < 0.5:
        ask = pick(rng, _CAPITALS).format(x=place)
    elif kind < 0.75:
        ask = pick(rng, _DEFINITIONS_ASKED).format(x=f"a {place.lower()}{pick(rng, NOUNS)}")
    else:
        ask = pick(rng, _UNKNOWABLE).format(n=pick(rng, NAMES), x=place)
    return "unknown", ask, UNKNOWN, "I cannot know this."
