"""A loop over tool calls for OpenAI's async client: it knows nothing of episodes, and is asked and trained as it is."""

import json

from memjax.environments.calculator import CALCULATOR, calculate

MOST_CALLS = 4


async def work(client, question, text=""):
    """Answers with the help of a calculator; `client` is an AsyncOpenAI, or an episode's."""
    messages = [{"role": "user", "content": f"{text}\n\n{question}" if text else question}]
    for _ in range(MOST_CALLS):
        response = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call.function)})
    return message.content or ""


def result_of(function):
    try:
        return calculate(json.loads(function.arguments)["expression"])
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: a call needs an expression ({error!r})."


async def solve(task, episode):
    text = task.context if isinstance(task.context, str) else "".join(task.context.pieces())
    return await work(episode.openai(), task.question, text)
