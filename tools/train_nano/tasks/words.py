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

COMMON = words(
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if "
    "will way about many then them would write like so these her long make thing see him two has look more day "
    "could go come did my sound no most number who over know water than call first people may down side been now "
    "find any new work part take get place made live where after back little only round man year came show every "
    "good me give our under name very through just form much great think say help low line before turn cause same "
    "mean differ move right boy old too does tell sentence set three want air well also play small end put home "
    "read hand port large spell add even land here must big high such follow act why ask men change went light kind "
    "off need house picture try us again animal point mother world near build self earth father head stand own page "
    "should country found answer school grow study still learn plant cover food sun four thought let keep eye never "
    "last door between city tree cross since hard start might story saw far sea draw left late run while press "
    "close night real life few stop open seem together next white children begin got walk example ease paper often "
    "always music those both mark book letter until mile river car feet care second group carry took rain eat room "
    "friend began idea fish mountain north once base hear horse cut sure watch color face wood main enough plain "
    "girl usual young ready above ever red list though feel talk bird soon body dog family direct pose leave song "
    "measure state product black short numeral class wind question happen complete ship area half rock order fire "
    "south problem piece told knew pass farm top whole king size heard best hour better true during hundred "
    "remember step early hold west ground interest reach fast five sing listen six table travel less morning ten "
    "simple several toward war lay against pattern slow center love person money serve appear road map science rule "
    "govern pull cold notice voice fall power town fine certain fly unit lead cry dark machine note wait plan "
    "figure star box noun field rest correct able pound done beauty drive stood contain front teach week final gave "
    "green quick develop sleep warm free minute strong special mind behind clear tail produce fact street inch lot "
    "nothing course stay wheel full force blue object decide surface deep moon island foot yet busy test record "
    "boat common gold possible plane age dry wonder laugh thousand ago ran check game shape yes miss brought heat "
    "snow bed bring sit perhaps fill east weight language among"
)

CODE = words(
    "abs add alias append apply array assert async await base batch begin bind bit block bool break buffer build "
    "byte cache call callback char check child class clear client clone close code column commit compare compile "
    "config connect const context continue copy count create cursor data date debug decode default define delete "
    "depth detach device dict digest disk dispatch document domain dtype dump each edit element else encode end "
    "engine entry enum env error event exec exit expand export extend factory fetch field file filter final find "
    "flag flat float flush fold for format frame from func future get global graph group guard handle hash head "
    "heap height hex hook host import index info init inner input insert instance int item iter join json key kind "
    "label lambda layer lazy left length level limit line link list load local lock log long loop main make map "
    "mask match matrix max merge message meta method min mock mode model module mount mutex name native nested next "
    "node none notify null number object offset open option order origin output owner pack page pair panic parent "
    "parse patch path pause payload peer pipe pixel point pool pop port post prefix print process profile proxy "
    "public pull push query queue raise random range rank raw read ready record reduce ref region register release "
    "remote remove rename render repeat replace reply request reset resize resolve response result resume retry "
    "return reverse right root route row run runtime sample save scale scan schema scope script search seed select "
    "self send server session set shape shared shift signal size skip slice slot sort source spawn split stack "
    "start state static status step stop store stream string struct sub submit suffix sum swap switch sync system "
    "table tag target task temp tensor test text thread time timer token tool total trace track train transform "
    "tree trim true try tuple type unit unlock unpack update upload url user utf value vector verify version view "
    "visit void wait walk watch weight while width window with word worker wrap write yield zero zip"
)


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
