"""Word lists that the tasks share. Closed lists, so that a small model meets each word often."""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """Cut a list of words at its spaces."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Cut a list of phrases at its bars."""
    return tuple(text.split("|"))


NAMES = words(
    "Ada Alice Amir Ana Anders Anna Aron Bea Ben Boris Carla Chen Clara Daniel Dara David Dina Eli Ella Emil Emma Eva "
    "Fatima Felix Finn Flora Frida George Grace Greta Hana Hassan Helen Hugo Ida Igor Ines Ivan Jack Jana Jin Joan "
    "Jonas Julia Kai Karim Kate Kofi Lara Lea Leo Lina Lucas Lucy Luis Maria Marta Max Mia Mila Milan Nadia Naomi "
    "Nina Noah Nora Olga Oscar Otto Paul Petra Pia Rafael Rana Rosa Ruth Sam Sara Sofia Tara Theo Tim Tom Uma Vera "
    "Victor Wanda Yuki Yusuf Zara Zoë José Łukasz Jürgen Chloé Søren Renée Ásta Øyvind Günter Anaïs"
)

CITIES = words(
    "Amsterdam Athens Berlin Bern Boston Cairo Chicago Dakar Delhi Denver Dublin Florence Geneva Hamburg Hanoi "
    "Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Milan Montreal Munich Nairobi Naples "
    "Oslo Ottawa Paris Porto Prague Quito Riga Rome Seoul Seville Sofia Stockholm Sydney Tokyo Toronto Turin Vienna "
    "Warsaw Zagreb Zürich Malmö Kraków Orléans Besançon Córdoba Aarhus Göteborg Lübeck"
)

COLORS = words(
    "red blue green yellow black white purple orange brown pink grey silver gold violet teal amber crimson beige"
)

ITEMS = (  # singular, plural
    *(
        (word, word + "s")
        for word in words(
            "apple pear lemon egg coin stamp card book pen marble shell button candle ticket bottle cup plate chair "
            "lamp key flower seed "
            "rock toy sticker cookie orange banana carrot ball bead token poster folder brick nail "
            "screw tile rope map badge ribbon mug spoon towel pillow basket jar cable"
        )
    ),
    ("box", "boxes"),
    ("brush", "brushes"),
    ("berry", "berries"),
    ("peach", "peaches"),
    ("battery", "batteries"),
    ("leaf", "leaves"),
)

ADJECTIVES = words(
    "amber ancient bitter bold brave brief bright broad calm clear clever cold cosmic crisp curious dark deep distant "
    "dry dusty eager early easy fair famous fast fierce final firm flat fresh frozen gentle giant glad golden grand "
    "green happy heavy hidden hollow honest humble icy idle jolly keen kind large late lazy light little lively lone "
    "long loud lucky merry mighty misty modest narrow neat noble odd old pale plain polite proud quick quiet rapid "
    "rare rich rough round royal rusty sharp shiny short shy silent silver simple slow small smooth soft solid "
    "spare steady steep stern still strange strong sunny sweet swift tall thin tidy tiny vast warm wet wide wild wise "
    "young"
)

NOUNS = words(
    "anchor arrow badger basin beacon bear bell birch bird boat bridge brook canyon castle cedar cliff cloud comet "
    "copper crane creek crow crystal dawn deer delta desert dolphin dove dragon eagle ember falcon fern field finch "
    "fire fjord flame forest fox garden gate glacier grove harbor hawk heron hill horse island ivy jungle kite lake "
    "lantern lark leaf lily lion lotus lynx maple marsh meadow mill moon moss moth mountain ocean orchid otter owl "
    "panda path pearl pebble pine planet pond raven reef ridge river robin rose sail salmon sand seal shadow shore sky "
    "snow spark sparrow spring star stone storm stream summit swan thunder tiger tower trail tree tulip valley violet "
    "wave whale willow wind wolf wren"
)

FRUITS = words("apples pears plums grapes figs dates cherries melons lemons peaches")

COUNTRIES = (  # country, capital
    ("France", "Paris"),
    ("Germany", "Berlin"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Portugal", "Lisbon"),
    ("Ireland", "Dublin"),
    ("Norway", "Oslo"),
    ("Sweden", "Stockholm"),
    ("Finland", "Helsinki"),
    ("Denmark", "Copenhagen"),
    ("Iceland", "Reykjavik"),
    ("Poland", "Warsaw"),
    ("Austria", "Vienna"),
    ("Switzerland", "Bern"),
    ("Belgium", "Brussels"),
    ("the Netherlands", "Amsterdam"),
    ("Greece", "Athens"),
    ("Turkey", "Ankara"),
    ("Hungary", "Budapest"),
    ("Romania", "Bucharest"),
    ("Bulgaria", "Sofia"),
    ("Croatia", "Zagreb"),
    ("Serbia", "Belgrade"),
    ("Slovenia", "Ljubljana"),
    ("Slovakia", "Bratislava"),
    ("the Czech Republic", "Prague"),
    ("Ukraine", "Kyiv"),
    ("Latvia", "Riga"),
    ("Estonia", "Tallinn"),
    ("Lithuania", "Vilnius"),
    ("Russia", "Moscow"),
    ("Japan", "Tokyo"),
    ("China", "Beijing"),
    ("South Korea", "Seoul"),
    ("India", "New Delhi"),
    ("Thailand", "Bangkok"),
    ("Vietnam", "Hanoi"),
    ("Indonesia", "Jakarta"),
    ("the Philippines", "Manila"),
    ("Nepal", "Kathmandu"),
    ("Mongolia", "Ulaanbaatar"),
    ("Iran", "Tehran"),
    ("Iraq", "Baghdad"),
    ("Jordan", "Amman"),
    ("Egypt", "Cairo"),
    ("Morocco", "Rabat"),
    ("Tunisia", "Tunis"),
    ("Kenya", "Nairobi"),
    ("Ghana", "Accra"),
    ("Senegal", "Dakar"),
    ("Ethiopia", "Addis Ababa"),
    ("Canada", "Ottawa"),
    ("the United States", "Washington"),
    ("Mexico", "Mexico City"),
    ("Cuba", "Havana"),
    ("Brazil", "Brasília"),
    ("Argentina", "Buenos Aires"),
    ("Chile", "Santiago"),
    ("Peru", "Lima"),
    ("Colombia", "Bogotá"),
    ("Ecuador", "Quito"),
    ("Uruguay", "Montevideo"),
    ("Australia", "Canberra"),
    ("New Zealand", "Wellington"),
)
