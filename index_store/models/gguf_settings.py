"""What a GGUF file says of its model, as a configuration of transformers: every setting is used, or refused by its key.

Settings of the model stand under its architecture (`llama.rope.scaling.type`), here without that prefix. What a file
leaves out has the value that llama.cpp, for which such files are made, takes for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import decoders, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

if TYPE_CHECKING:
    from index_store.models.attention_reading import LayerReading

ARCHITECTURES: Mapping[str, str] = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}
"""Model types of transformers by the names that GGUF files have for them."""

_ATTRIBUTES: Mapping[str, str] = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "feed_forward_length": "intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
}
"""Attributes of configurations by settings; only where the model's own configuration has the attribute."""

_NEUTRAL: Mapping[str, Sequence[object]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_gating_func": (1,),  # softmax
    "expert_shared_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (False,),
}
"""Settings that are only understood with a value that changes nothing."""

_ROPE = ("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear")
_SCALING = "rope.scaling."
_CHECKED = (
    "attention.key_length",
    "attention.scale",
    "attention.sliding_window_pattern",
    "attention.value_length",
)
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
USED_BY_SETTINGS = (_ROPE_FACTORS, *_LONG_FACTORS)
"""Tensors that become part of the configuration: factors of the wave lengths of the rotary embedding."""

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of those whose queries are scaled by the embedding's width

Factors = Mapping[str, Sequence[float]]


class UnusedSettingError(Exception):
    """A setting that the converted model would not have."""


class GgufSettings:
    """Settings of one file. metadata: all keys of the file, arrays of texts as their lengths."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Sequence[str]) -> None:
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UnusedSettingError(
                f"general.architecture is {self.architecture!r}; understood are {', '.join(ARCHITECTURES)}"
            )
        if metadata.get("general.type", "model") != "model":
            raise UnusedSettingError(
                f"general.type is {metadata['general.type']!r}; only models can be served"
            )
        if metadata.get("split.count", 1) > 1:
            raise UnusedSettingError(
                f"split.count is {metadata['split.count']}: it is one part of several; merge them "
                "(`gguf-split --merge` of llama.cpp)"
            )
        self._metadata = metadata
        self._tensors = frozenset(tensors)
        prefix = f"{self.architecture}."
        self._own = {
            key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
        }
        self._defaults = CONFIG_MAPPING[ARCHITECTURES[self.architecture]]()

    def config(self, factors: Factors) -> Any:
        """The configuration. factors: values of the tensors `USED_BY_SETTINGS` that the file has.

        Raises UnusedSettingError.
        """
        given: dict[str, Any] = {}
        for name, value in self._own.items():
            attribute = _ATTRIBUTES.get(name)
            if name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise self._unused(name)
            elif attribute is not None and hasattr(self._defaults, attribute):
                given[attribute] = value
            elif name not in (*_ROPE, *_CHECKED) and not name.startswith(_SCALING):
                raise self._unused(name)
        given |= {"tie_word_embeddings": "output.weight" not in self._tensors}
        given |= self._ids() | self._widths() | self._biases() | self._windows()
        given["rope_parameters"] = rope = self._rope(factors)
        original = "original_max_position_embeddings"
        if hasattr(self._defaults, original):  # has the last word over the one among the rotary parameters
            given[original] = rope.get(original, self._need("context_length"))
        return CONFIG_MAPPING[ARCHITECTURES[self.architecture]](**given)

    def check(self, config: Any, readings: Sequence[LayerReading], rotated: Sequence[int]) -> None:
        """Compares what a model of this configuration does with the settings.

        readings: how its layers attend. rotated: dimensions of its rotary embeddings. Raises UnusedSettingError for the
        first setting that differs.
        """
        for name, attribute in _ATTRIBUTES.items():
            if name in self._own and not _same(getattr(config, attribute), self._own[name]):
                raise self._unused(name)
        width = self.head_dim
        scale = self._own.get("attention.scale") or 1 / math.sqrt(self._scaled_by)
        window = self._own.get("attention.sliding_window") or None
        if window is not None and window >= config.max_position_embeddings:
            window = None
        for name, holds in (
            ("attention.key_length", all(own.head_dim == width for own in readings)),
            ("attention.value_length", self._own.get("attention.value_length", width) == width),
            ("attention.scale", all(_same(own.scale, float(scale)) for own in readings)),
            ("attention.sliding_window", {own.window for own in readings} - {None} == {window} - {None}),
            (
                "attn_logit_softcapping",
                {own.cap for own in readings} == {self._own.get("attn_logit_softcapping")},
            ),
            ("rope.dimension_count", set(rotated) <= {self._own.get("rope.dimension_count", width)}),
        ):
            if not holds:
                raise self._unused(name)

    def reason(self, error: Exception) -> Exception:
        """Why a model of this configuration does not run: the setting that not every family can have, or the error."""
        partly = self._own.get("rope.dimension_count", self.head_dim) != self.head_dim
        return self._unused("rope.dimension_count") if partly else error

    @property
    def head_dim(self) -> int:
        """Channels of a key."""
        return int(
            self._own.get("attention.key_length")
            or self._need("embedding_length") // self._need("attention.head_count")
        )

    @property
    def _scaled_by(self) -> int:
        """What the products of queries and keys are divided by the root of."""
        if _GEMMA_27B.get(self.architecture) == self._own.get("block_count"):
            return int(self._need("embedding_length") // self._need("attention.head_count"))
        return self.head_dim

    def _need(self, name: str) -> Any:
        if name not in self._own:
            raise UnusedSettingError(f"it has no {self.architecture}.{name}")
        return self._own[name]

    def _unused(self, name: str) -> UnusedSettingError:
        value = self._own.get(name, "missing")
        return UnusedSettingError(
            f"{self.architecture}.{name} is {value!r}, which the converted model would not have"
        )

    def _ids(self) -> dict[str, Any]:
        key = "tokenizer.ggml.{}_token_id".format
        named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {attribute: self._metadata.get(key(name)) for attribute, name in named.items()}

    def _widths(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "vocab_size": self._own.get("vocab_size") or self._metadata.get("tokenizer.ggml.tokens", 0)
        }
        usual = self._need("embedding_length") // self._need("attention.head_count")
        if hasattr(self._defaults, "head_dim") or self.head_dim != usual:
            given["head_dim"] = self.head_dim
        if hasattr(self._defaults, "query_pre_attn_scalar"):
            given["query_pre_attn_scalar"] = self._scaled_by
        if "attention.head_count_kv" not in self._own:
            given["num_key_value_heads"] = self._need("attention.head_count")
        if self.architecture == "qwen3moe":
            given["norm_topk_prob"] = self._own.get("expert_weights_norm", True)
        return given

    def _biases(self) -> dict[str, bool]:
        """Which of its biases the model has; those that have no place are found when tensors are placed."""
        ends = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias", "qkv_bias": "attn_q.bias"}
        return {
            attribute: f"blk.0.{end}" in self._tensors
            for attribute, end in ends.items()
            if hasattr(self._defaults, attribute)
        }

    def _windows(self) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if hasattr(self._defaults, "sliding_window") and not self._own.get("attention.sliding_window"):
            given["sliding_window"] = None
        pattern = self._own.get("attention.sliding_window_pattern")
        if pattern is not None:
            if not getattr(self._defaults, "layer_types", None):
                raise self._unused("attention.sliding_window_pattern")
            layers = range(self._need("block_count"))
            slides = (
                list(pattern)
                if isinstance(pattern, list | tuple)
                else [(layer + 1) % pattern != 0 for layer in layers]
            )
            given["layer_types"] = ["sliding_attention" if own else "full_attention" for own in slides]
        return given

    def _rope(self, factors: Factors) -> dict[str, Any]:
        base = float(self._own.get("rope.freq_base", 10_000.0))
        rope = {"rope_theta": base, **self._scaling(factors)}
        width = self._own.get("rope.dimension_count", self.head_dim)
        if width != self.head_dim:
            rope["partial_rotary_factor"] = width / self.head_dim
        if not isinstance(
            next(iter((getattr(self._defaults, "rope_parameters", None) or {"": None}).values())), dict
        ):
            if "rope.freq_base_swa" in self._own:
                raise self._unused("rope.freq_base_swa")
            return rope
        sliding = {"rope_type": "default", "rope_theta": float(self._own.get("rope.freq_base_swa", 10_000.0))}
        return {"full_attention": rope, "sliding_attention": sliding}

    def _scaling(self, factors: Factors) -> dict[str, Any]:
        """Kind and parameters of the rotary embedding's scaling."""
        own = {
            name.removeprefix(_SCALING): value
            for name, value in self._own.items()
            if name.startswith(_SCALING)
        }
        own.pop("finetuned", None)
        kind = own.pop("type", None)
        factor = float(own.pop("factor", self._own.get("rope.scale_linear", 1.0)))
        if kind == "none":
            factor = 1.0
        kind = "linear" if kind in (None, "none") else kind
        original = int(own.pop("original_context_length", self._need("context_length")))
        attention = float(own.pop("attn_factor", 1.0))
        if all(name in factors for name in _LONG_FACTORS):
            short, long = (list(factors[name]) for name in _LONG_FACTORS)
            self._none_left(own, {})
            return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention,
                    "original_max_position_embeddings": original}  # fmt: skip
        if kind not in ("linear", "yarn"):
            raise self._unused(f"{_SCALING}type")
        plain = kind == "linear" and factor == 1.0
        if _ROPE_FACTORS in factors and not plain:
            raise UnusedSettingError(
                f"it has {_ROPE_FACTORS} beside {self.architecture}.{_SCALING}factor {factor}"
            )
        if kind == "linear":
            self._none_left(own, {} if attention == 1.0 else {"attn_factor": attention})
        if _ROPE_FACTORS in factors:
            # The same factors whatever the length: exactly what the file says, for all positions that it has.
            given = list(factors[_ROPE_FACTORS])
            return {"rope_type": "longrope", "short_factor": given, "long_factor": given, "attention_factor": 1.0,
                    "original_max_position_embeddings": self._need("context_length")}  # fmt: skip
        if kind == "linear":
            return {"rope_type": "default"} if plain else {"rope_type": "linear", "factor": factor}
        slow, fast = (
            float(own.pop(f"yarn_beta_{name}", usual)) for name, usual in (("slow", 1.0), ("fast", 32.0))
        )
        attention *= float(own.pop("yarn_attn_factor", 1.0))
        if own.get("yarn_ext_factor") == 1.0:
            own.pop("yarn_ext_factor")
        self._none_left(own, {})
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_slow": slow,
                "beta_fast": fast, "attention_factor": attention * (0.1 * math.log(factor) + 1.0)}  # fmt: skip

    def _none_left(self, own: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        for name in (*own, *more):
            raise self._unused(f"{_SCALING}{name}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return isinstance(one, int | float) and math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


_PREFIX = "tokenizer.ggml."
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_UNUSED_IDS = ("seperator", "cls", "mask", "prefix", "suffix", "middle")
_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")
_USED = frozenset(
    (
        *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_space_prefix"),
        *(f"{name}_token_id" for name in _IDS),
    )
)
_LABELS = frozenset(
    (*(f"{name}_token_id" for name in _UNUSED_IDS), *(f"fim_{part}_token_id" for part in _FIM))
)
"""Tokens with a meaning that nothing here asks for."""
_NEUTRAL_TOKENS: Mapping[str, object] = {
    "add_eos_token": False,
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
    "token_type_count": 1,
}
_GPT2 = frozenset(("gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "gigachat", "mpt", "olmo", "jais"))
_SINGLE_DIGITS = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
)
_LLAMA_3 = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
)
_WHOLE_WORDS = _LLAMA_3 | {"tekken"}  # a word that is a token is one, whatever the merges say
_BEGINS = _LLAMA_3  # unless the file says otherwise
_BLANK = "\u2581"


def gguf_tokenizer(file: Path, metadata: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """The tokenizer, and the tokens that end an answer. Raises UnusedSettingError for a setting that would be lost."""
    own = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    for name, value in own.items():
        if name in _NEUTRAL_TOKENS and value == _NEUTRAL_TOKENS[name]:
            continue
        if name not in _USED | _LABELS:
            raise UnusedSettingError(f"{_PREFIX}{name} is {value!r}, which is not understood")
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    backend, kind, pre = tokenizer.backend_tokenizer, own.get("model"), own.get("pre")
    if kind == "gpt2":
        _mend_cutting(backend, pre)
        begins = bool(own.get("add_bos_token", pre in _BEGINS))
    elif kind == "llama":
        begins = bool(own.get("add_bos_token", True))
        _mend_blank(backend, bool(own.get("add_space_prefix", True)))
    else:
        raise UnusedSettingError(f"{_PREFIX}model is {kind!r}; understood are gpt2 and llama")
    _mend_beginning(tokenizer, own.get("bos_token_id") if begins else None)
    named = (own.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    return tokenizer, sorted({int(id_) for id_ in named if id_ is not None})


def _mend_cutting(backend: Any, pre: str | None) -> None:
    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre is not None and pre not in _GPT2 and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        raise UnusedSettingError(f"{_PREFIX}pre is {pre!r}, a way of cutting texts that is not known here")
    backend.model.ignore_merges = pre in _WHOLE_WORDS


def _mend_blank(backend: Any, wanted: bool) -> None:
    """Has a text begin with a blank, or not."""
    if (backend.encode("a", add_special_tokens=False).tokens[0][:1] == _BLANK) == wanted:
        return
    if wanted:
        raise UnusedSettingError(f"{_PREFIX}add_space_prefix is true, which its tokenizer would not do")
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _mend_beginning(tokenizer: Any, token: int | None) -> None:
    """Has a text begin with a token, or with none."""
    backend = tokenizer.backend_tokenizer
    if token is None:
        backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    else:
        text = backend.id_to_token(int(token))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{text} $A" if " " not in text else [text, "$A"], special_tokens=[(text, int(token))]
        )
