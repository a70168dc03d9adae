"""Other engines: they say what foredraft says, their figures are counted right, and their failures have a reason."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.bench.peers import (
    PEERS,
    Peer,
    PeerError,
    PeerOptions,
    PeerRequest,
    PeerSpec,
    available,
    open_peer,
    parse_peer,
)
from foredraft.bench.peers.base import Watch
from foredraft.bench.peers.process import ProcessPeer
from foredraft.bench.peers.prometheus import FOREDRAFT, parse_metrics
from foredraft.bench.peers.sse import Server
from foredraft.bench.peers.transformers import TransformersPeer
from foredraft.bench.peers.url import UNKNOWN, UrlPeer
from foredraft.bench.records import Cell, Turn
from foredraft.errors import InvalidInputError
from foredraft.types import SamplingParams
from gguf_files import write_gguf
from tiny import tiny_llama

TOKENS = 40
PROMPT = "hello the hello the hello"


def request(
    ids: tuple[int, ...] = (1, 2, 3),
    drafter: str = "none",
    *,
    messages: tuple[dict[str, str], ...] = (),
    draft_tokens: int | None = None,
    max_tokens: int = TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
) -> PeerRequest:
    return PeerRequest(ids, messages, drafter, draft_tokens, max_tokens, temperature, seed)


# Names


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("transformers", PeerSpec("transformers")),
        ("llama.cpp:prompt-lookup", PeerSpec("llama.cpp", "prompt-lookup")),
        ("openvino:prompt-lookup:4", PeerSpec("openvino", "prompt-lookup", 4)),
        ("transformers:assistant=org/name", PeerSpec("transformers", "assistant=org/name")),
        ("transformers:assistant=C:\\draft:5", PeerSpec("transformers", "assistant=C:\\draft", 5)),
        ("url:http://localhost:8000", PeerSpec("url", "http://localhost:8000")),
        ("url:https://a.b/v1#model", PeerSpec("url", "https://a.b/v1#model")),
    ],
)
def test_names_of_peers(text: str, spec: PeerSpec) -> None:
    assert parse_peer(text) == spec


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("llamacpp", "Did you mean 'llama.cpp'"),
        ("vllm", "Known: transformers, llama.cpp, openvino, url"),
        ("llama.cpp:prompt_lookup", "Did you mean 'prompt-lookup'"),
        ("llama.cpp:assistant=x", "no drafter 'assistant'"),
        ("transformers:assistant", "assistant=REF"),
        ("transformers:assistant=", "assistant=REF"),
        ("transformers:prompt-lookup=4", "name none"),
        ("transformers:prompt-lookup:0", "at least 1"),
        ("transformers:none:4", "cannot draft 4"),
        ("url", "http://host:port"),
        ("url:localhost:8000", "http://host:port"),
    ],
)
def test_a_name_that_means_no_peer_is_told_with_what_would(text: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match=why.replace(".", r"\.")):
        parse_peer(text)


def test_a_peer_has_a_cell() -> None:
    assert parse_peer("llama.cpp:prompt-lookup:4").cell(0.5) == Cell(
        "prompt-lookup", 4, temperature=0.5, engine="llama.cpp"
    )


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="ids"):
        request(())
    with pytest.raises(InvalidInputError, match="max_tokens"):
        request(max_tokens=0)
    with pytest.raises(InvalidInputError, match="draft_tokens"):
        request(draft_tokens=0)
    with pytest.raises(InvalidInputError, match="threads"):
        PeerOptions(threads=0)
    with pytest.raises(InvalidInputError, match="timeout"):
        PeerOptions(timeout=0)
    assert "secret" not in repr(PeerOptions(api_key="secret"))
    assert "api_key" not in PeerOptions(api_key="secret").to_json()


@pytest.mark.parametrize(("name", "extra"), [("llama.cpp", "foredraft[llama]"), ("openvino", "foredraft[openvino]")])
def test_a_peer_that_is_not_installed_is_named_with_the_command(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    why = available(name)
    assert why is not None and f"pip install '{extra}'" in why
    with pytest.raises(PeerError, match=f"{name}: .*is not installed"):
        open_peer(name, PeerOptions())
    assert available("transformers") is None and available("url") is None


def test_a_peer_that_reads_gguf_files_needs_one(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    why = available("llama.cpp", PeerOptions(model=str(tiny_folder)))
    assert why is not None and "reads GGUF files" in why and str(tiny_folder) in why
    assert "no model" in (available("openvino", PeerOptions(model="nothing")) or "")
    file = tiny_folder.parent / "other.gguf"
    file.write_bytes(b"GGUF")
    assert available("llama.cpp", PeerOptions(model=str(tiny_folder), gguf=str(file))) is None


# Figures


def test_forwards_are_counted_where_they_scored_tokens() -> None:
    watch = Watch()
    watch.forward()  # a chunk of the prompt: it scores nothing
    watch.forward([7, 8])
    watch.emit([7, 9])  # one accepted, one corrected
    watch.forward([5, 6])
    watch.emit([5])  # the answer ends with a drafted token
    turn = watch.turn(request(), "text")
    assert (turn.ids, turn.target_forwards, turn.drafted, turn.accepted) == ((7, 9, 5), 2, 4, 2)
    assert 0 <= turn.ttft <= turn.seconds and turn.prompt_tokens == 3
    with pytest.raises(PeerError, match="without a token"):
        Watch().turn(request(), "")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux keeps a peak")
def test_the_peak_is_that_of_one_answer() -> None:
    """In a process of its own: in this one, memory that others freed comes and goes."""
    script = """
from foredraft.bench.peers import memory
memory.reset_peak()
before = memory.peak()
held = bytearray(b"x" * 100_000_000)
assert memory.peak() >= before + 90_000_000
del held
assert memory.peak() >= before + 90_000_000
memory.reset_peak()
assert memory.peak() < before + 50_000_000
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Engines


class Case:
    """A model that an engine reads, foredraft's own answer, and a prompt."""

    def __init__(self, model: Path, cache: Path) -> None:
        own = foredraft.load(str(model), "none", backend="transformers", cache=cache)
        self.ids = tuple(own.encode(PROMPT))
        self.completion = own.generate(list(self.ids), SamplingParams(max_tokens=TOKENS))
        self.options = PeerOptions(model=str(model), cache=str(cache), threads=1, context=512)


@pytest.fixture(scope="session")
def cases(tiny_folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """By engine: a folder for transformers, a GGUF file of 16-bit floats for the others."""
    cache = tmp_path_factory.mktemp("cache")
    file = cache / "tiny.gguf"
    extra = {"general.file_type": 1, "general.quantization_version": 2}  # without these OpenVINO reads nothing
    extra["tokenizer.ggml.bos_token_id"] = tokenizer.eos_token_id
    write_gguf(file, tiny_llama(seed=3, vocabulary=len(tokenizer)), tokenizer, {"": "F16"}, extra)
    packed = Case(file, cache)
    return {"transformers": Case(tiny_folder, cache), "llama.cpp": packed, "openvino": packed}


@pytest.fixture(scope="session")
def in_process() -> Iterator[Callable[[str, PeerOptions], Any]]:
    """Makes peers in this process, each once."""
    made: dict[str, Peer] = {}

    def make(name: str, options: PeerOptions) -> Peer:
        why = available(name)
        if why is not None:
            pytest.skip(why)
        if name not in made:
            made[name] = PEERS[name](options)
        return made[name]

    yield make
    for peer in made.values():
        peer.close()


ENGINES = ("transformers", "llama.cpp", "openvino")


@pytest.mark.parametrize("name", ENGINES)
def test_plain_decoding_says_the_same_in_as_many_forwards_as_tokens(
    name: str, cases: dict[str, Case], in_process: Any
) -> None:
    case = cases[name]
    turn = in_process(name, case.options).answer(request(case.ids))
    assert turn.ids == case.completion.ids
    assert (turn.target_forwards, turn.draft_forwards, turn.drafted, turn.accepted) == (turn.tokens, 0, 0, 0)
    assert turn.prompt_tokens == len(case.ids) and 0 < turn.ttft < turn.seconds
    assert turn.text.replace("\ufffd", "") == case.completion.text.replace("\ufffd", "")  # OpenVINO leaves them out
    short = in_process(name, case.options).answer(request(case.ids, max_tokens=5))
    assert short.ids == turn.ids[:5] and short.target_forwards == 5


@pytest.mark.parametrize("name", ENGINES)
def test_prompt_lookup_says_the_same_in_fewer_forwards(name: str, cases: dict[str, Case], in_process: Any) -> None:
    case = cases[name]
    turn = in_process(name, case.options).answer(request(case.ids, "prompt-lookup", draft_tokens=3))
    assert turn.ids == case.completion.ids
    assert turn.accepted >= 1 and turn.target_forwards == turn.tokens - turn.accepted
    assert turn.draft_forwards == 0
    if name == "openvino":
        assert turn.drafted is None
        return
    assert turn.accepted <= turn.drafted <= 3 * turn.target_forwards
    one = in_process(name, case.options).answer(request(case.ids, "prompt-lookup", draft_tokens=1))
    assert 0 < one.drafted <= one.target_forwards and one.drafted < turn.drafted


@pytest.mark.parametrize("name", ENGINES)
def test_sampling_follows_its_seed_and_temperature(name: str, cases: dict[str, Case], in_process: Any) -> None:
    case = cases[name]

    def answer(temperature: float, seed: int) -> tuple[int, ...]:
        return in_process(name, case.options).answer(request(case.ids, temperature=temperature, seed=seed)).ids  # type: ignore[no-any-return]

    assert answer(1e-3, 1) == case.completion.ids
    assert answer(2.0, 1) == answer(2.0, 1) != answer(2.0, 2)


def test_llama_cpp_reads_every_prompt_anew(
    cases: dict[str, Case], in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["llama.cpp"]
    peer = in_process("llama.cpp", case.options)
    from llama_cpp import Llama

    read: list[int] = []  # an independent count of forwards, with the tokens in each
    evaluate = Llama.eval

    def counted(llama: Any, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        evaluate(llama, tokens)

    monkeypatch.setattr(Llama, "eval", counted)
    for drafter in ("none", "prompt-lookup"):
        for _ in range(2):
            read.clear()
            turn = peer.answer(request(case.ids, drafter, draft_tokens=3 if drafter != "none" else None))
            assert read[0] == len(case.ids) and len(read) == turn.target_forwards
            assert sum(read[1:]) == turn.drafted + len(read) - 1


def test_a_prompt_without_room_is_told(cases: dict[str, Case], in_process: Any) -> None:
    with pytest.raises(PeerError, match="context of 1000 or more"):
        in_process("llama.cpp", cases["llama.cpp"].options).answer(request((1,) * 900, max_tokens=100))


def test_an_assistant_model_drafts(cases: dict[str, Case], in_process: Any) -> None:
    case = cases["transformers"]
    peer = in_process("transformers", case.options)
    scored: list[None] = []
    handle = peer._target.register_forward_hook(lambda *_: scored.append(None))  # an independent count
    try:
        same = peer.answer(request(case.ids, f"assistant={case.options.model}", draft_tokens=3))
    finally:
        handle.remove()
    assert peer._assistants[case.options.model][0].generation_config.num_assistant_tokens == 3
    assert same.ids == case.completion.ids
    assert same.target_forwards == len(scored) < same.tokens
    assert same.accepted == same.drafted == same.draft_forwards
    assert same.accepted == same.tokens - same.target_forwards + 1  # the token that ended it was drafted too


def test_what_a_model_brings_does_not_change_the_law(tiny_folder: Path, cases: dict[str, Case]) -> None:
    peer: Any = TransformersPeer(cases["transformers"].options)
    assert peer._target.generation_config.eos_token_id is None  # foredraft's settings and those of each request count
    assert peer._stop_tokens == [264]


def test_a_peer_in_its_own_process(cases: dict[str, Case]) -> None:
    case = cases["transformers"]
    with closing(open_peer("transformers", case.options)) as peer:
        turn = peer.answer(request(case.ids))
        assert turn.ids == case.completion.ids and turn.target_forwards == turn.tokens
        assert peer.peak_memory is not None and peer.peak_memory > 50_000_000
        assert peer.conditions()["threads"] == "1" and peer.conditions()["weights"] == "float32"
        with pytest.raises(PeerError, match="does not draft with 'magic'"):
            peer.answer(request(case.ids, "magic"))
        with pytest.raises(PeerError, match="There is no model 'nothing'"):
            peer.answer(request(case.ids, "assistant=nothing"))
        assert peer.answer(request(case.ids)).ids == turn.ids


def test_a_model_that_does_not_load_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="transformers: There is no model 'nothing'"):
        open_peer("transformers", PeerOptions(model="nothing", cache=str(tmp_path), threads=1))


# The worker's protocol

FAKE = """
import ctypes, os, sys, time
from foredraft.bench.peers import PEERS, worker
from foredraft.bench.peers.base import Peer, Watch

class Fake(Peer):
    name, drafters = "fake", ("none", "dies", "hangs", "fails")
    def answer(self, request):
        print("a library prints to stdout")
        os.write(1, b"and one in C too\\n")
        assert sys.stdin.read() == ""
        if request.drafter == "dies":
            sys.stderr.write("out of luck\\n"); sys.stderr.flush(); os._exit(3)
        if request.drafter == "hangs":
            time.sleep(60)
        if request.drafter == "fails":
            raise RuntimeError("no such\\nthing")
        watch = Watch(); watch.forward(); watch.emit([os.getpid()])
        return watch.turn(request, "text")
    def conditions(self):
        print("printed while starting")
        return {"version": "1"}

PEERS["fake"] = Fake
worker.main()
"""


class Fake(Peer):
    """What the parent knows of the fake."""

    name = "fake"
    drafters = ("none", "dies", "hangs", "fails")

    def answer(self, request: PeerRequest) -> Turn:
        raise NotImplementedError


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., ProcessPeer]:
    """A peer whose worker runs this script."""

    def start(script: str, **options: Any) -> ProcessPeer:
        file = tmp_path / "worker.py"
        file.write_text(script)
        return ProcessPeer(Fake, PeerOptions(threads=1, **options), [sys.executable, str(file)])

    return start


def test_what_libraries_print_does_not_reach_the_protocol(worker: Any) -> None:
    with closing(worker(FAKE)) as peer:
        assert peer.conditions() == {"version": "1"}
        first = peer.answer(request())
        assert first.tokens == 1 and peer.answer(request()).ids == first.ids


def test_a_request_that_fails_says_why_and_the_worker_lives_on(worker: Any) -> None:
    with closing(worker(FAKE)) as peer:
        before = peer.answer(request()).ids
        with pytest.raises(PeerError, match="fake: RuntimeError: no such"):
            peer.answer(request(drafter="fails"))
        assert peer.peak_memory is None
        assert peer.answer(request()).ids == before


def test_a_worker_that_dies_is_told_with_its_last_words_and_replaced(worker: Any) -> None:
    with closing(worker(FAKE)) as peer:
        before = peer.answer(request()).ids
        with pytest.raises(PeerError, match=r"(?s)fake: its process ended with status 3 while answering.*out of luck"):
            peer.answer(request(drafter="dies"))
        assert peer.answer(request()).ids != before  # another process


def test_a_worker_that_hangs_is_ended(worker: Any) -> None:
    with closing(worker(FAKE, timeout=0.5)) as peer:
        with pytest.raises(PeerError, match=r"said nothing for 0\.5 s while answering"):
            peer.answer(request(drafter="hangs"))
        assert peer._worker is None


READY = "import sys; sys.stdin.readline(); print('{\"ready\": {}}', flush=True); sys.stdin.readline()\n"


@pytest.mark.parametrize("reply", ["not JSON", "[1]", '{"turn": {"ids": 1}}', "{}"])
def test_a_reply_that_is_none_is_told(reply: str, worker: Any) -> None:
    peer = worker(f"{READY}print({reply!r}, flush=True); sys.stdin.readline()")
    with closing(peer), pytest.raises(PeerError, match=r"no reply|is none"):
        peer.answer(request())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit(7)", "status 7 while starting"),
        ("nonsense", r"(?s)status 1 while starting.*NameError"),
        ("import sys, os; sys.stdin.readline(); os.close(1); sys.exit(0)", "status 0 while starting"),
        ("import time; time.sleep(60)", "said nothing for 1 s while starting"),
        ('print(\'{"error": "no room"}\', flush=True)', "fake: no room"),
    ],
)
def test_a_worker_that_does_not_start_is_told(script: str, why: str, worker: Any) -> None:
    with pytest.raises(PeerError, match=why):
        worker(script, start_timeout=1 if "sleep" in script else 60)


# URLs


class FakeServer:
    """An OpenAI-compatible server on this machine that says what it is told to.

    `pages` are the answers to GETs by path; those of `/metrics` come one after the other, the last one again and again.
    """

    def __init__(self, owner: str = "", metrics: tuple[str, ...] = ()) -> None:
        self.pages = {"/v1/models": json.dumps({"data": [{"id": "tiny", "owned_by": owner}]})}
        self.metrics = list(metrics)
        self.events: list[Any] = []
        self.status = 200
        self.pause = self.drip = 0.0  # seconds before the first event, and before each
        self.asked: list[tuple[str, Any, str | None]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = fake.pages.get(self.path)
                if self.path == "/metrics" and fake.metrics:
                    page = fake.metrics.pop(0) if len(fake.metrics) > 1 else fake.metrics[0]
                self._send(404 if page is None else 200, page or "no such page")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.asked.append((self.path, body, self.headers.get("Authorization")))
                time.sleep(fake.pause)
                if fake.status != 200:
                    self._send(fake.status, str(fake.events[0]))
                    return
                lines = [e if isinstance(e, str) else f"data: {json.dumps(e)}" for e in fake.events]
                self._send(200, ": a comment\n\n")
                for line in lines:
                    time.sleep(fake.drip)
                    self.wfile.write(f"{line}\n\n".encode())

            def _send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: Any) -> None:
                pass

        class Http(ThreadingHTTPServer):
            def handle_error(self, *arguments: Any) -> None:
                pass  # of clients that went away

        self.http = Http(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Starts servers, and ends them."""
    started: list[FakeServer] = []

    def start(*arguments: Any) -> FakeServer:
        started.append(FakeServer(*arguments))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def delta(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}, **more}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
MESSAGES = ({"role": "user", "content": "hello"},)


def ask(server: FakeServer, peer: UrlPeer | None = None, **settings: Any) -> Turn:
    peer = peer or UrlPeer(PeerOptions())
    return peer.answer(request(drafter=server.url, **{"messages": MESSAGES, **settings}))


def counts(turn: Turn) -> tuple[int | None, ...]:
    return turn.drafted, turn.accepted, turn.target_forwards, turn.draft_forwards


def page(counters: Mapping[str, float], labels: str = "") -> str:
    return "# HELP x y\n# TYPE x counter\n" + "".join(f"{name}{labels} {value}\n" for name, value in counters.items())


def test_a_url_is_asked_in_openai_form_and_timed(serve: Any) -> None:
    server = serve()
    server.events = [ROLE, delta("he"), delta("llo"), delta("", "length"), usage(2), "data: [DONE]"]
    peer = UrlPeer(PeerOptions(api_key="secret"))
    turn = ask(server, peer, max_tokens=2, temperature=0.5, seed=2**40 + 7)
    path, body, key = server.asked[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "hello"}] and body["stream_options"]["include_usage"]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("tiny", 2, 0.5, 7)
    assert not {"top_k", "return_token_ids"} & set(body)  # a server that is not known may refuse them
    assert (turn.text, turn.prompt_tokens, turn.ids) == ("hello", 9, (UNKNOWN, UNKNOWN))
    assert 0 < turn.ttft <= turn.seconds and counts(turn) == (None,) * 4 and peer.peak_memory is None
    assert peer.conditions() == {server.url: "unknown server, model tiny"}


def test_a_raw_text_goes_to_a_url_as_its_token_ids_where_they_are_taken(serve: Any, tokenizer: Any) -> None:
    ids = tuple(tokenizer.encode("hello"))
    for owner, prompt in (("llamacpp", list(ids)), ("somebody", "hello")):
        server = serve(owner)
        server.events = [{"choices": [{"text": "a", "finish_reason": "length"}]}, usage(1)]
        assert ask(server, UrlPeer(PeerOptions(), tokenizer), messages=(), ids=ids).text == "a"
        path, body, _ = server.asked[0]
        assert path == "/v1/completions" and body["prompt"] == prompt and "messages" not in body


def test_ids_from_the_text_where_a_server_tells_none(serve: Any, tokenizer: Any) -> None:
    server, peer = serve(), UrlPeer(PeerOptions(), tokenizer)
    own = tokenizer.encode("hello", add_special_tokens=False)
    server.events = [delta("hel"), delta("lo", "stop"), "data: [DONE]"]
    assert ask(server, peer).ids == (*own, tokenizer.eos_token_id)  # what ended it has no text
    server.events = [delta("hello", "length"), usage(len(own))]
    assert ask(server, peer).ids == tuple(own)
    server.events = [delta("hello", "length"), usage(len(own) + 2)]
    assert ask(server, peer).ids == (*own, UNKNOWN, UNKNOWN)  # other tokens than the usual ones: as many as it says
    server.events = [delta("", "stop"), usage(1)]
    assert ask(server, peer).ids == (tokenizer.eos_token_id,)
    server.events = [delta("hello", "length")]
    with pytest.raises(PeerError, match="give the target's tokenizer"):
        ask(server)


def test_vllm(serve: Any) -> None:
    names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    labels = '{engine="0",model_name="a {\\"b\\"}"}'

    def metrics(drafts: int, drafted: int, at: tuple[int, ...], generated: int) -> str:
        rows = dict(zip(names, (drafts, drafted, sum(at)), strict=True)) | {"vllm:generation_tokens_total": generated}
        places = "".join(f'{by_position}{{engine="0",position="{i}"}} {n}.0\n' for i, n in enumerate(at))
        return page(rows, labels) + places + page(dict.fromkeys(names, 5), '{engine="1"}')

    before, after = metrics(10, 30, (8, 4), 100), metrics(12, 36, (10, 5), 106)
    server, peer = serve("vllm", (before, before, after)), UrlPeer(PeerOptions())  # it counts a little later
    server.events = [delta("a", token_ids=[1, 2, 3]), delta("b", "stop", token_ids=[4, 5, 6]), usage(6)]
    turn = ask(server, peer)
    assert turn.ids == (1, 2, 3, 4, 5, 6) and counts(turn) == (6, 3, 3, None)
    assert peer.acceptance.accepted_at == (2, 1)
    body = server.asked[0][1]
    assert body["return_token_ids"] and body["top_k"] == -1 and body["repetition_penalty"] == 1.0
    server.metrics = []
    ask(server, peer)
    assert body["cache_salt"] != server.asked[1][1]["cache_salt"]


def test_vllm_without_speculation_decodes_plainly(serve: Any) -> None:
    server = serve("vllm", tuple(page({"vllm:generation_tokens_total": n}) for n in (10, 12)))
    server.events = [delta("a", "stop"), usage(2)]
    assert counts(ask(server)) == (0, 0, 2, None)


def test_llama_cpp_server(serve: Any) -> None:
    server = serve("llamacpp")
    server.events = [delta("a"), delta("b", "stop"), usage(6, timings={"draft_n": 5, "draft_n_accepted": 3})]
    assert counts(ask(server)) == (5, 3, 3, None)
    assert server.asked[0][1]["cache_prompt"] is False and server.asked[0][1]["top_k"] == 0
    server.events[-1] = usage(2, timings={"draft_n": 5, "draft_n_accepted": 3})  # the end cut two of the accepted ones
    assert counts(ask(server)) == (5, 1, 1, None)
    server.events[-1] = usage(6, timings={"predicted_n": 6})
    assert counts(ask(server)) == (0, 0, 6, None)
    names = "llamacpp:spec_decode_num_draft_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_total"
    pages = (dict(zip(names, values, strict=True)) for values in ((10, 4), (18, 6)))
    server.metrics = [
        page({**each, "llamacpp:tokens_predicted_total": n}) for each, n in zip(pages, (0, 6), strict=True)
    ]
    server.events[-1] = usage(6)
    assert counts(ask(server)) == (8, 2, 4, None)


def test_sglang(serve: Any) -> None:
    calls, gauge = "sglang:spec_verify_calls_total", {"sglang:spec_num_draft_tokens": 4}
    server = serve("sglang", tuple(page({calls: n, **gauge}) for n in (10, 12)))
    server.events = [delta("a", "stop"), usage(7)]
    assert counts(ask(server)) == (6, 4, 3, None)  # the prompt's forward and two that verified three tokens each
    server.metrics = [page({calls: 12, **gauge})] * 2
    assert counts(ask(server)) == (0, 0, 7, None)
    server.metrics = [page({"sglang:spec_accept_length": 3.5})] * 2  # an older one: the gauge alone
    assert counts(ask(server)) == (None, 5, 2, None)
    server.metrics = [page({"sglang:spec_accept_length": 0.0})] * 2
    assert counts(ask(server)) == (None,) * 4


def test_foredraft_server(serve: Any) -> None:
    before = dict.fromkeys(FOREDRAFT.values(), 100)
    grown = zip(FOREDRAFT.values(), (6, 8, 4, 2, 5), strict=True)
    after = {name: 100 + by for name, by in grown}
    server = serve("foredraft", (page(before), page(after)))
    server.events = [delta("a", "stop", token_ids=[1, 2, 3, 4, 5, 6])]
    turn = ask(server)
    assert turn.tokens == 6 and counts(turn) == (8, 4, 2, 5)


def test_counts_that_are_of_others_too_are_not_told(serve: Any) -> None:
    before = dict.fromkeys(FOREDRAFT.values(), 0)
    server = serve("foredraft", (page(before), page(dict.fromkeys(before, 50))))
    server.events = [delta("a", "stop", token_ids=[1, 2])]
    assert counts(ask(server)) == (None,) * 4


def test_metrics_that_are_none_are_passed_over() -> None:
    text = 'a 1\na{x="1"} 2e0\nb{position="3",y="}"} 4\nc nan-sense\n} 5\n\n# a 7\n'
    assert parse_metrics(text) == {"a": 3.0, "b": 4.0, "b[3]": 4.0}


@pytest.mark.parametrize(
    ("status", "events", "why"),
    [
        (400, ['{"error": {"message": "prompt too long"}}'], "status 400: prompt too long"),
        (404, ['{"error": "no model"}'], "status 404: no model"),
        (500, ["Internal\nError"], "status 500: Internal Error"),
        (503, [""], "status 503: it says nothing more"),
        (200, [delta("a"), {"error": {"message": "out of memory"}}], "broke off: out of memory"),
        (200, [delta("a"), "data: {nonsense"], "no JSON object: '{nonsense'"),
        (200, ["data: [1]"], "no JSON object"),
        (200, [{"choices": [1]}], "not of OpenAI's form"),
        (200, [delta("a")], "broke off"),
        (200, [], "broke off"),
        (200, [delta("", "stop"), usage(0)], "no token"),
    ],
)
def test_a_server_that_fails_says_why(status: int, events: list[Any], why: str, serve: Any) -> None:
    server = serve()
    server.status, server.events = status, events
    with pytest.raises(PeerError, match=why):
        ask(server)


def test_a_server_that_is_slow_or_away_is_told(serve: Any) -> None:
    server = serve()
    server.pause, server.events = 1.0, [delta("a", "stop")]
    with pytest.raises(PeerError, match=r"took longer than 0\.2 s"):
        ask(server, UrlPeer(PeerOptions(timeout=0.2)))
    server.pause, server.drip, server.events = 0.0, 0.15, [delta("a")] * 20  # never silent for long
    with pytest.raises(PeerError, match=r"took longer than 0\.2 s"):
        ask(server, UrlPeer(PeerOptions(timeout=0.2)))
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(PeerError, match="is it running"):
        ask(server)


def test_a_server_without_the_model_or_the_api_is_told(serve: Any) -> None:
    server = serve()
    peer = UrlPeer(PeerOptions())
    with pytest.raises(PeerError, match=r"does not serve the model 'other'\. It serves: tiny"):
        peer.answer(request(drafter=f"{server.url}#other"))
    with pytest.raises(PeerError, match="status 404"):
        peer.answer(request(drafter=server.url.removesuffix("/v1")))
    server.pages["/v1/models"] = "[]"
    with pytest.raises(PeerError, match="lists no models"):
        ask(server)
    with pytest.raises(PeerError, match="as many tokens as it was started with"):
        ask(server, draft_tokens=4)
    for wrong in ("http://", "ftp://host/v1", "http://host:port/v1"):
        with pytest.raises(PeerError, match="is no URL"):
            Server(wrong)


def test_a_url_is_opened_without_a_process() -> None:
    with closing(open_peer("url", PeerOptions())) as peer:
        assert isinstance(peer, UrlPeer)
