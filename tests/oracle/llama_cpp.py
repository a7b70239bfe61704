"""llama.cpp's own forward, through the C functions that the `xllamacpp` wheel exports; nothing is built.

Parameter structs are passed as opaque blocks that are larger than they are in that version: the library fills in its
defaults and reads no further than its own size. The layout of `llama_batch` is the only one that is spelled out.
"""

import ctypes
import os
import time
from functools import lru_cache
from pathlib import Path

import numpy as np


class _Parameters(ctypes.Structure):
    _fields_ = [("block", ctypes.c_uint64 * 64)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


@lru_cache
def _library() -> ctypes.CDLL:
    import xllamacpp

    library = ctypes.CDLL(str(Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so"))
    pointer = ctypes.c_void_p
    signatures = {
        "llama_model_default_params": (_Parameters, []),
        "llama_context_default_params": (_Parameters, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Parameters]),
        "llama_init_from_model": (pointer, [pointer, _Parameters]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (ctypes.c_int32, [pointer]),
        "llama_batch_init": (_Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
        "llama_decode": (ctypes.c_int32, [pointer, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        "llama_tokenize": (
            ctypes.c_int32,
            [pointer, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
            + [ctypes.c_bool, ctypes.c_bool],
        ),
        "llama_synchronize": (None, [pointer]),
        "llama_set_n_threads": (None, [pointer, ctypes.c_int32, ctypes.c_int32]),
        "llama_batch_free": (None, [_Batch]),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
        "llama_backend_init": (None, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
    library.llama_log_set(silent, None)
    library.keep_alive = silent
    library.llama_backend_init()
    return library


def _load(path: Path):
    library = _library()
    model = library.llama_model_load_from_file(os.fsencode(path), library.llama_model_default_params())
    assert model, f"llama.cpp cannot load {path}"
    return library, model


def logits_of(path: Path, input_ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocabulary] of one sequence of at most 1024 ids."""
    return timed_logits(path, input_ids, first=0)[0]


def timed_logits(path: Path, input_ids: np.ndarray, first: int) -> tuple[np.ndarray, float]:
    """Logits from position `first` on, and the seconds that the forward took on all cores of this process."""
    library, model = _load(path)
    parameters = library.llama_context_default_params()
    # n_ctx and n_batch are the first two fields in every version so far
    sizes = ctypes.cast(ctypes.pointer(parameters), ctypes.POINTER(ctypes.c_uint32))
    assert sizes[0] == 512 and sizes[1] == 2048, "llama_context_params has another layout"
    sizes[0] = 1024
    context = library.llama_init_from_model(model, parameters)
    assert context
    threads = len(os.sched_getaffinity(0))
    library.llama_set_n_threads(context, threads, threads)
    vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(len(input_ids), 0, 1)
    batch.n_tokens = len(input_ids)
    for i, token in enumerate(input_ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, i >= first
        batch.seq_id[i][0] = 0
    started = time.perf_counter()
    assert library.llama_decode(context, batch) == 0
    library.llama_synchronize(context)
    seconds = time.perf_counter() - started
    rows = [
        np.ctypeslib.as_array(library.llama_get_logits_ith(context, i), (vocabulary,))
        for i in range(first, len(input_ids))
    ]
    logits = np.stack(rows).copy()
    library.llama_batch_free(batch)
    library.llama_free(context)
    library.llama_model_free(model)
    return logits, seconds


def tokenize(path: Path, text: str) -> list[int]:
    """Ids of a text by llama.cpp's tokenizer, without special tokens."""
    library, model = _load(path)
    data = text.encode()
    room = (ctypes.c_int32 * (len(data) + 8))()
    count = library.llama_tokenize(library.llama_model_get_vocab(model), data, len(data), room, len(room), False, False)
    assert count >= 0
    library.llama_model_free(model)
    return list(room[:count])
