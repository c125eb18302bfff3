"""Facts about people, and questions for them in other words. No content word occurs in both."""

from __future__ import annotations

# What is said of somebody, and a question that only one of them answers.
FACTS: tuple[tuple[str, str], ...] = (
    ("owns a bakery on the corner of Mill Street", "Who sells fresh bread?"),
    ("has been a strict vegetarian since childhood", "Which person never eats meat?"),
    ("plays the violin in the city orchestra", "Who is a musician?"),
    ("flies passenger jets between London and New York", "Who works as an airline pilot?"),
    ("teaches mathematics to twelve-year-old pupils", "Which person works at a school?"),
    ("gave birth to twins last spring", "Who became a mother of two babies?"),
    ("keeps eleven cows and a few goats", "Who is a farmer?"),
    ("broke a leg while skiing in January", "Which person was hurt in a winter accident?"),
    ("cannot swim and is afraid of deep water", "Who should stay out of the ocean?"),
    ("removes bad teeth and fits golden crowns", "Who is a dentist?"),
    ("drives a yellow taxi through the town at night", "Which person takes passengers home after dark?"),
    ("moved to a small flat in Paris", "Who lives in France now?"),
    ("grows roses and tulips behind the house", "Which person has a garden full of flowers?"),
    ("finished the marathon four minutes before everybody else", "Who won the long race?"),
    ("repairs engines and changes old tyres", "Who is a car mechanic?"),
    ("wrote three novels about pirates", "Which person is an author of adventure books?"),
    ("looks after sick patients in the hospital", "Who is a nurse?"),
    ("learned Japanese from both parents", "Which person comes from a family of Tokyo?"),
    ("paints large portraits in oil", "Who is an artist?"),
    ("puts out burning houses and saves people from smoke", "Who is a firefighter?"),
    ("is allergic to milk and cheese", "Which person must avoid dairy products?"),
    ("cuts hair in a narrow salon", "Who is a barber?"),
    ("catches salmon from a wooden boat", "Who is a fisherman?"),
    ("defends thieves and murderers in court", "Who is a lawyer?"),
    ("watches distant galaxies through a telescope", "Which person studies the stars?"),
    ("dug coal deep under the ground for thirty years", "Who used to be a miner?"),
    ("prepares dinner for the guests of a grand hotel", "Who is a chef?"),
    ("sews dresses and shortens trousers", "Who is a tailor?"),
    ("has a cat, two rabbits and a noisy parrot", "Which person keeps several pets?"),
    ("draws plans for bridges and tunnels", "Who is a civil engineer?"),
    ("delivers letters and parcels before noon", "Who works for the post office?"),
    ("borrowed money and was never able to pay it back", "Which person is in debt?"),
)
