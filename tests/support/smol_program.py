"""A program written for smolagents. It is run by a Python that has it, in a separate process."""

import json
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool  # pyright: ignore[reportMissingImports]


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


base_url, api_key, question = sys.argv[1:]
model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=2, verbosity_level=0)
try:
    answer = str(agent.run(question))
except Exception as error:  # an untrained policy may give no answer
    answer = f"{type(error).__name__}: {error}"
print(json.dumps({"answer": answer, "steps": len(agent.memory.steps)}))
