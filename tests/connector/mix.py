"""The same seeded mix of requests for any engine: shared prefixes, all at once, some given up in the middle.

asked = mix(300, seed=1, chunk=32)
answers = run(engine, asked)            # by index; those that were given up are missing
agree(answers, run(another, asked))
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.engine import Completion, InProcessEngine, completion_of

IN_FLIGHT = 6
DOCUMENTS = 10


@dataclass(frozen=True)
class Asked:
    """One request; `patience` is the number of steps after which it is given up, if it is not over by then."""

    prompt: tuple[int, ...]
    max_tokens: int
    patience: int | None
    salt: str


def mix(count: int, seed: int, chunk: int, longest: int) -> list[Asked]:
    """Requests whose prompts begin with some chunks of one of a few documents and go on by themselves."""
    rng = random.Random(seed)
    documents = [rng.choices(range(256), k=longest) for _ in range(DOCUMENTS)]
    asked = []
    for _ in range(count):
        shared = rng.choice(documents)[: rng.randrange(chunk // 2, longest - chunk)]
        prompt = tuple(shared + rng.choices(range(256), k=rng.randrange(1, chunk)))
        patience = rng.randrange(1, 6) if rng.random() < 0.1 else None
        # Most are short; some grow by several blocks, which takes these from others.
        max_tokens = rng.randrange(1, 6) if rng.random() < 0.85 else rng.randrange(chunk, 2 * chunk)
        asked.append(Asked(prompt, max_tokens, patience, rng.choice(["", "", "", "a tenant"])))
    return asked


def run(engine: InProcessEngine, asked: Sequence[Asked]) -> dict[int, Completion]:
    """Serve the mix, IN_FLIGHT requests at a time; the answers of those that were not given up."""
    from vllm import SamplingParams

    llm = engine.llm.llm_engine
    left = {str(i): one for i, one in enumerate(asked)}
    waiting, steps, answers = list(left), dict[str, int](), dict[int, Completion]()
    while left:
        while waiting and len(steps) < IN_FLIGHT:
            request_id = waiting.pop(0)
            one = left[request_id]
            steps[request_id] = 0
            parameters = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=one.max_tokens, logprobs=5)
            prompt = {"prompt_token_ids": list(one.prompt)} | ({"cache_salt": one.salt} if one.salt else {})
            llm.add_request(request_id, prompt, parameters)
        for output in llm.step():
            if output.finished:
                answers[int(output.request_id)] = completion_of(output)
                del left[output.request_id], steps[output.request_id]
        for request_id in list(steps):
            steps[request_id] += 1
            patience = left[request_id].patience
            if patience is not None and steps[request_id] > patience:
                llm.abort_request([request_id])
                del left[request_id], steps[request_id]
    while engine.scheduler.has_requests():  # what a given-up request still loads
        llm.step()
    return answers


def disagreements(ours: dict[int, Completion], theirs: dict[int, Completion], tolerance: float) -> list[str]:
    """Each request that both answered, differently by more than `tolerance` in a logprob."""
    found = []
    for i in sorted(ours.keys() & theirs.keys()):
        difference = _difference(ours[i], theirs[i])
        if difference > tolerance:
            found.append(f"request {i}: {difference:.4f}, {ours[i].tokens} instead of {theirs[i].tokens}")
    return found


def _difference(one: Completion, other: Completion) -> float:
    """The largest difference of a logprob that both name, up to the first token that they chose differently: there
    only how much less likely each thought the other's choice.
    """
    worst = 0.0
    for mine, their, my_logprobs, their_logprobs in zip(
        one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True
    ):
        if mine != their:
            gaps = [
                my_logprobs[mine] - my_logprobs.get(their, -99.0),
                their_logprobs[their] - their_logprobs.get(mine, -99.0),
            ]
            return max(worst, *gaps)
        worst = max(worst, abs(my_logprobs[mine] - their_logprobs[mine]))
    return worst
