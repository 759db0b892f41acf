"""What the workers embed: sentences, and a query to search them with."""

CORPUS = (
    "The library stays open until nine on weekdays and closes at noon on Saturdays.",
    "Water the tomatoes early in the morning, before the sun dries the soil.",
    "A full charge takes about forty minutes and lasts for two days of normal use.",
    "The night train to Vienna leaves from platform seven and has a dining car.",
    "Knead the dough for ten minutes, then let it rise until it has doubled in size.",
    "Our refund policy covers unopened items that are returned within thirty days.",
    "The glacier has lost a third of its ice since measurements began in 1950.",
    "She learned to play the cello at sixty and joined an orchestra two years later.",
    "Back up your photographs to a second disk before you install the update.",
    "The museum shows early maps of the coast and the instruments they were drawn with.",
    "Bees find their way home by the position of the sun, even when clouds hide it.",
    "Replace the battery when the smoke detector beeps once a minute.",
)

QUERY = "How do I send something back and get my money?"
