"""Administration of several workers, with workers that only take notes: all have an adapter or none, and so on."""

import threading

import pytest
from collector import wait_until

from dq_engine.errors import RequestError
from dq_engine.serving.adapters import Adapters
from dq_engine.serving.administration import Administration
from dq_engine.serving.control_protocol import MAX_TIMEOUT_S, ControlCall
from dq_engine.serving.messages import Result


class Workers:
    """Three workers, of which `refusing` do not register adapters. `paths`: of each one's adapters."""

    def __init__(self) -> None:
        self.ready_workers = [0, 1, 2]
        self.paths: list[dict[str, str]] = [{}, {}, {}]
        self.adapters = Adapters(self.call, lambda: self.ready_workers, {})
        self.refusing: set[int] = set()
        self.held: threading.Event | None = None
        self.calls: list[tuple] = []
        self.draining = False

    def call(self, operation, arguments, payload, timeout_s, worker=None, too_late=None) -> Result:
        self.calls.append((operation, arguments, payload, timeout_s, worker))
        if self.held is not None:
            assert self.held.wait(20)
        if operation == "register_lora":
            if worker in self.refusing:
                raise RequestError("INVALID_ARG", f"path: worker {worker} does not like it")
            self.paths[worker][arguments["name"]] = arguments["path"]
        elif operation == "unregister_lora" and self.paths[worker].pop(arguments["name"], None) is None:
            raise RequestError("NOT_FOUND", "name: nobody")
        return Result(0, {"of": worker}, b"payload")


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def administration(workers):
    return Administration(workers, None)


def ask(administration, operation, token=None, payload=None, timeout_s=60.0, **arguments):
    return administration.handle(ControlCall(operation, arguments, payload, token, timeout_s)).value


def refusal(administration, *arguments, **options) -> str:
    with pytest.raises(RequestError) as error:
        ask(administration, *arguments, **options)
    return str(error.value)


def test_an_adapter_goes_to_all_workers(administration, workers):
    answer = ask(administration, "register_lora", name="a", path="x")
    assert answer == {"workers": [{"worker": n, "of": n} for n in range(3)]}
    assert workers.paths == [{"a": "x"}] * 3
    ask(administration, "unregister_lora", name="a")
    assert workers.paths == [{}] * 3
    assert refusal(administration, "unregister_lora", name="a") == "NOT_FOUND: name: nobody"


def test_all_workers_have_an_adapter_or_none(administration, workers):
    workers.refusing = {2}
    message = "INVALID_ARG: path: worker 2 does not like it"
    assert refusal(administration, "register_lora", name="a", path="x") == message
    assert workers.paths == [{}] * 3
    workers.refusing = set()
    ask(administration, "register_lora", name="a", path="old")
    workers.refusing = {1}
    assert refusal(administration, "register_lora", name="a", path="new").startswith("INVALID_ARG: ")
    assert workers.paths == [{"a": "old"}] * 3


def test_of_two_changes_of_a_name_at_once_one_is_told(administration, workers):
    workers.held = threading.Event()
    thread = threading.Thread(target=ask, args=(administration, "register_lora"), kwargs={"name": "a", "path": "x"})
    thread.start()
    wait_until(lambda: bool(workers.calls), 10, "the first")
    message = 'UNAVAILABLE: name: "a" is being changed by another operation; try again'
    assert refusal(administration, "register_lora", name="a", path="y") == message
    assert refusal(administration, "unregister_lora", name="a") == message
    other = threading.Thread(target=ask, args=(administration, "register_lora"), kwargs={"name": "b", "path": "y"})
    other.start()
    workers.held.set()
    thread.join(20)
    other.join(20)
    assert workers.paths == [{"a": "x", "b": "y"}] * 3
    ask(administration, "unregister_lora", name="a")


def test_statistics_are_of_all_workers(administration, workers):
    workers.ready_workers = [0, 2]  # one is being restarted
    answer = ask(administration, "statistics")
    assert answer == {"draining": False, "workers": [{"worker": n, "of": n} for n in (0, 2)]}


@pytest.mark.parametrize("operation", ["statistics", "list_loras"])
def test_a_worker_that_dies_while_all_are_asked_is_left_out(administration, workers, monkeypatch, operation):
    call, dies = workers.call, True

    def broken_call(*arguments):
        if arguments[-1] == 1:
            workers.ready_workers = [0, 2] if dies else [0, 1, 2]
            raise RequestError("INTERNAL", "the engine worker 1 died; its streams are lost")
        return call(*arguments)

    monkeypatch.setattr(workers, "call", broken_call)
    assert [each["worker"] for each in ask(administration, operation)["workers"]] == [0, 2]
    dies, workers.ready_workers = False, [0, 1, 2]
    assert refusal(administration, operation).startswith("INTERNAL: the engine worker 1 died")


@pytest.mark.parametrize("operation", ["list_voices", "information"])
def test_what_any_worker_knows(administration, workers, operation):
    assert ask(administration, operation) == {"of": None}
    assert workers.calls == [(operation, {}, None, 60.0, None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a", "nam": "b"}, "Object contains unknown field `nam`"),
        ({}, "Object missing required field `name`"),
        ({"name": 5}, "Expected `str`, got `int` - at `$.name`"),
        ({"name": "a", "prompt_latents": "x"}, "Expected `bytes | null`, got `str` - at `$.prompt_latents`"),
    ],
)
def test_wrong_arguments(administration, workers, arguments, message):
    with pytest.raises(RequestError) as error:
        administration.handle(ControlCall("register_voice", arguments))
    assert str(error.value) == f"INVALID_ARG: arguments: {message}"
    assert workers.calls == []


def test_latents_stay_bytes(administration, workers):
    administration.handle(ControlCall("register_voice", {"name": "a", "prompt_latents": b"raw"}))
    assert workers.calls[0][1] == {"name": "a", "prompt_latents": b"raw", "given_as_payload": "reference_audio"}


def test_time_limits_are_bounded(administration, workers):
    ask(administration, "information", timeout_s=1e9)
    ask(administration, "information", timeout_s=-5)
    assert [call[3] for call in workers.calls] == [MAX_TIMEOUT_S, 0.0]


def test_a_token_fences_all_but_encode(workers):
    administration = Administration(workers, "secret")
    assert ask(administration, "encode", purpose="prompt", payload=b"x") == {"of": None}
    refused = "INVALID_ARG: token: is not the administration's"
    for operation in administration._fenced:
        assert refusal(administration, operation, name="a").startswith("INVALID_ARG: token: is required; ")
        assert refusal(administration, operation, token="secre", name="a") == refused
    assert [call[0] for call in workers.calls] == ["encode"]
    assert ask(administration, "drain", token="secret") == {"draining": True}


def test_the_token_is_compared_in_constant_time(workers, monkeypatch):
    """By the one function of the library that promises it, and by nothing else."""
    compared = []
    hmac = "dq_engine.serving.administration.hmac.compare_digest"
    monkeypatch.setattr(hmac, lambda one, other: compared.append((one, other)) or True)
    ask(Administration(workers, "sécret"), "drain", token="other")
    assert compared == [(b"other", "sécret".encode())]


def test_what_is_given_as_payload_has_a_name(administration, workers):
    ask(administration, "register_voice", name="a", payload=b"x")
    administration.handle(ControlCall("register_voice", {"name": "a", "payload": "prompt_audio"}, b"x"))
    given = [call[1]["given_as_payload"] for call in workers.calls]
    assert given == ["reference_audio", "prompt_audio"]
