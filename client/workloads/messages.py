"""Chat messages of users: questions, code, lists, summaries and small talk, made from templates and subjects.

They were written for this project. This module must not know how messages are sent.
"""

TOPICS = (
    "the tides", "volcanoes", "compound interest", "photosynthesis", "the French Revolution", "black holes", "sourdough bread",
    "vaccines", "jet lag", "glaciers", "inflation", "the Silk Road", "honey bees", "noise-canceling headphones", "dreams",
    "the printing press", "electric cars", "allergies", "coral reefs", "chess openings", "the water cycle", "solar panels",
)  # fmt: skip
QUESTIONS = (
    "What should everybody know about {}?", "Explain {} to a ten-year-old.", "Give me a short introduction to {}.",
    "I have an exam tomorrow. What are the three things I must know about {}?", "What do most people get wrong about {}?",
    "Tell me one surprising fact about {}.", "Why should I care about {} in everyday life?",
    "Give me an analogy that makes {} easy to understand.",
)  # fmt: skip
TASKS = (
    "reverses a string", "counts the words in a text file", "checks whether a number is prime", "merges two sorted lists",
    "removes duplicates from a list and keeps the order", "converts Celsius to Fahrenheit", "finds the longest line of a file",
    "computes the n-th Fibonacci number", "groups a list of dates by month", "parses a CSV file without a library",
)  # fmt: skip
CODE = (
    "Write a Python function that {}.", "Show me a shell one-liner that {}.", "Write a unit test for a function that {}.",
    "What is the time complexity of a program that {}, and can it be faster?",
    "My JavaScript function that {} returns undefined. What are the usual mistakes?",
)  # fmt: skip
GOALS = (
    "a birthday party for eight children", "a weekend in Lisbon", "moving to a new apartment", "learning the guitar",
    "a week of vegetarian dinners", "a first job interview", "a home office in a small room", "running a 10 km race",
    "a book club meeting", "saving money on groceries",
)  # fmt: skip
LISTS = (
    "Make a checklist for {}.", "List five ideas for {}.", "What should I avoid when planning {}? Use bullet points.",
    "Plan {} step by step.", "What are the pros and cons of asking a professional for help with {}?",
)  # fmt: skip
TEXTS = (
    "The library will close at six on weekdays from March on, because two of its five employees retire. Weekend hours stay "
    "as they are. Books can still be returned at any time through the box beside the entrance.",
    "Our team moved the database to a larger machine on Tuesday. Reads became faster, but nightly backups now take four "
    "hours instead of two, since the new disks share a network link. We will try compression next week.",
    "The bridge was built in 1904 for carts and light rail. Today twelve thousand cars cross it each day. Engineers found "
    "cracks in three of its supports, and the city must choose between a repair and a new bridge downstream.",
    "Maria planted forty tomato seedlings in April. A late frost killed half of them, and snails ate six more. The "
    "remaining plants gave so much fruit that she sold two crates at the market every Saturday in August.",
    "The meeting agreed on three points: the release moves to the ninth, the old export stays for one more version, and "
    "support answers within one working day. It left open who will pay for the additional tests.",
    "A study followed two hundred people who took a walk of twenty minutes after lunch. They reported being less tired at "
    "four o'clock than a group that rested. The authors caution that they did not measure how well either group worked.",
)
SUMMARIES = (
    "Summarize this in one sentence: {}", "Rewrite this for a friend in a casual tone: {}",
    "What is the most important fact in this text, and why? {}", "Turn this into three bullet points: {}",
    "Write a short headline for this text: {}",
)  # fmt: skip
PEOPLE = (
    "my landlord about a broken heater",
    "a colleague who leaves after ten years",
    "my neighbor about loud music",
    "a teacher whose lesson I missed",
    "a customer whose parcel is late",
    "my grandmother, who turns ninety",
)
LETTERS = (
    "Write a polite two-sentence message to {}.", "Help me start an email to {}.", "What tone should I use when I write to {}?",
)  # fmt: skip
FOLLOW_UPS = (
    "Can you say that in simpler words?", "Give me an example.", "Why is that?", "Which of these points matters most?",
    "What would an expert add?", "Is there a case where this is not true?", "Thanks. Now make it shorter.",
    "What should I do first?", "How sure are you about that?", "Compare that with the opposite view.",
    "Please repeat the last part as a list.", "What question should I ask next?",
)  # fmt: skip
KINDS = ((QUESTIONS, TOPICS), (CODE, TASKS), (LISTS, GOALS), (SUMMARIES, TEXTS), (LETTERS, PEOPLE))


def openings() -> list[str]:
    """Return every first message: each template with each subject of its kind."""
    return [template.format(subject) for templates, subjects in KINDS for template in templates for subject in subjects]
