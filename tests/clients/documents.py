"""What the model of these tests has learned, and who asks for it. Needs the standard library
only: both environments import it."""

MODEL = "trained"
HELLO, HELLO_ANSWER = "Say hello.", "Hello, world."
COUNT, COUNT_ANSWER = "Count to ten.", "one two three four five six seven eight nine ten"
PERSON, PERSON_ANSWER = "A person, as JSON.", '{"name":"Ada","age":36}'
WEATHER, WEATHER_RESULT = "Weather in Oslo?", "3 degrees"
WEATHER_ANSWER = "It is 3 degrees in Oslo."
TOOL, CITY = "get_weather", "Oslo"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
