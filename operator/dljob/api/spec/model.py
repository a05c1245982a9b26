"""``spec.model``: the model to train."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dljob.api.base import ApiModel, Rule


class BuiltinModel(StrEnum):
    MLP = "mlp"
    DIGITS_CNN = "digits-cnn"
    LENET = "lenet"
    RESNET18 = "resnet18"
    RESNET50 = "resnet50"
    GPT_MINI = "gpt-mini"


class ReferenceModel(StrEnum):
    """Published models with known costs, for ``hints.like``. A training script trains them."""

    ALEXNET = "AlexNet"
    VGG_16 = "VGG-16"
    GOOGLENET = "GoogLeNet"
    RESNET_18 = "ResNet-18"
    RESNET_34 = "ResNet-34"
    RESNET_50 = "ResNet-50"
    RESNET_101 = "ResNet-101"
    RESNET_152 = "ResNet-152"
    VIT_B_16 = "ViT-B-16"
    VIT_L_16 = "ViT-L-16"
    BERT_BASE = "BERT-base"
    BERT_LARGE = "BERT-large"
    GPT_2 = "GPT-2"
    GPT_2_MEDIUM = "GPT-2-medium"
    GPT_2_LARGE = "GPT-2-large"
    GPT_2_XL = "GPT-2-XL"
    LLAMA_2_7B = "Llama-2-7B"
    LLAMA_2_13B = "Llama-2-13B"
    LLAMA_2_70B = "Llama-2-70B"
    LLAMA_3_2_1B = "Llama-3.2-1B"
    LLAMA_3_8B = "Llama-3-8B"
    LLAMA_3_70B = "Llama-3-70B"


BUILTIN_MODELS = tuple(member.value for member in BuiltinModel)

PAIRED_MODELS = ("mlp", "lenet", "gpt-mini")
"""Built-in models that tensor parallelism supports, because they have pairs of linear layers, which it can split."""


BLOCK_MODELS = ("resnet18", "resnet50", "gpt-mini")
"""Built-in models with blocks, for activation checkpointing."""

REFERENCES_WITHOUT_BLOCKS = ("AlexNet", "VGG-16", "GoogLeNet")
"""Published models of which the planner knows no blocks for activation checkpointing."""


class ModelPairs(ApiModel):
    """The pairs of linear layers that strategy Tensor splits over ranks, with the layers between them, of a script."""

    count: Annotated[int, Field(ge=1, le=10**5, description="Number of pairs.")]
    units: Annotated[
        int,
        Field(ge=1, le=10**9, description="Attention heads or features of the pair with the fewest: at most as many "
              "ranks can split the model."),
    ]  # fmt: skip
    parameters: Annotated[int, Field(ge=0, le=10**15, description="Number of trainable parameters in all pairs.")]
    flops_per_sample: Annotated[
        float, Field(gt=0, le=10**18, description="Floating-point operations of a sample in all pairs.")
    ]
    activation_bytes_per_sample: Annotated[
        int, Field(ge=0, le=10**18, description="Bytes of activations of a sample of which each rank keeps its part.")
    ]
    reduced_bytes_per_sample: Annotated[
        int, Field(ge=1, le=10**18, description="Bytes of activations and their gradients that ranks sum for a sample.")
    ]
    frozen_bytes: Annotated[
        int | None, Field(ge=0, le=10**16, description="Bytes of the parameters in all pairs that are not trained.")
    ] = None


class ModelHints(ApiModel):
    """Size of a model that is not built in, for the planner's predictions."""

    rules = (
        Rule(
            "like",
            "has(self.like) ? !has(self.parameters) && !has(self.flopsPerSample) && "
            "(!has(self.activationBytesPerSample) || self.activationBytesPerSample == 0) : "
            "has(self.parameters) && has(self.flopsPerSample)",
            "set hints.like (a known model, such as ResNet-50) and no other hint, or set both hints.parameters and "
            "hints.flopsPerSample, as python -m dltrain.profile prints them",
            lambda h: (
                h.parameters is None and h.flops_per_sample is None and h.activation_bytes_per_sample == 0
                if h.like
                else h.parameters is not None and h.flops_per_sample is not None
            ),
        ),
        Rule(
            "checkpointedActivationBytesPerSample",
            "!has(self.checkpointedActivationBytesPerSample) || (has(self.activationBytesPerSample) && "
            "self.checkpointedActivationBytesPerSample <= self.activationBytesPerSample)",
            "checkpointedActivationBytesPerSample must not exceed activationBytesPerSample, which like does not allow: "
            "set both as python -m dltrain.profile --blocks prints them, or remove it",
            lambda h: (
                h.checkpointed_activation_bytes_per_sample is None
                or h.checkpointed_activation_bytes_per_sample <= h.activation_bytes_per_sample
            ),
        ),
        Rule(
            "pairs",
            "!has(self.pairs) || (has(self.parameters) && has(self.flopsPerSample) && "
            "self.pairs.parameters <= self.parameters && self.pairs.flopsPerSample <= self.flopsPerSample && "
            "(!has(self.pairs.frozenBytes) || self.pairs.frozenBytes == 0 || "
            "(has(self.frozenBytes) && self.pairs.frozenBytes <= self.frozenBytes)) && "
            "(self.pairs.activationBytesPerSample == 0 || (has(self.activationBytesPerSample) && "
            "self.pairs.activationBytesPerSample <= self.activationBytesPerSample)))",
            "the figures of hints.pairs must not exceed those of the whole model, which like does not allow: set both "
            "as python -m dltrain.profile prints them, or remove pairs",
            lambda h: (
                h.pairs is None
                or (
                    h.parameters is not None
                    and h.flops_per_sample is not None
                    and h.pairs.parameters <= h.parameters
                    and h.pairs.flops_per_sample <= h.flops_per_sample
                    and h.pairs.activation_bytes_per_sample <= h.activation_bytes_per_sample
                    and (h.pairs.frozen_bytes or 0) <= (h.frozen_bytes or 0)
                )
            ),
        ),
        Rule(
            "frozenBytes",
            "!has(self.frozenBytes) || self.frozenBytes == 0 || has(self.parameters) || has(self.trainedParameters)",
            "hints.like means a model of which all parameters are trained: set hints.trainedParameters, or remove "
            "hints.frozenBytes. Or set hints.parameters and hints.flopsPerSample as python -m dltrain.profile prints "
            "them",
            lambda h: not h.frozen_bytes or h.parameters is not None or h.trained_parameters is not None,
        ),
        Rule(
            "trainedParameters",
            "!has(self.trainedParameters) || has(self.like)",
            "hints.trainedParameters is for hints.like: set like, or remove trainedParameters, because "
            "hints.parameters already is the number of trained parameters",
            lambda h: h.trained_parameters is None or h.like is not None,
        ),
        Rule(
            "denseOutputBytesPerSample",
            "!has(self.denseOutputBytesPerSample) || !has(self.like)",
            "the layers of hints.like are known: remove hints.denseOutputBytesPerSample",
            lambda h: h.dense_output_bytes_per_sample is None or h.like is None,
        ),
        Rule(
            "largestActivationBytesPerSample",
            "!has(self.largestActivationBytesPerSample) || (has(self.activationBytesPerSample) && "
            "self.largestActivationBytesPerSample <= self.activationBytesPerSample)",
            "largestActivationBytesPerSample must not exceed activationBytesPerSample, which like does not allow: set "
            "both as python -m dltrain.profile prints them, or remove it",
            lambda h: (
                h.largest_activation_bytes_per_sample is None
                or h.largest_activation_bytes_per_sample <= h.activation_bytes_per_sample
            ),
        ),
        Rule(
            "largestUnitParameters",
            "!has(self.largestUnitParameters) || (has(self.parameters) && "
            "(self.largestUnitParameters <= self.parameters || (has(self.frozenBytes) && "
            "self.largestUnitParameters <= self.parameters + self.frozenBytes)))",
            "largestUnitParameters must not exceed hints.parameters, and one for each of hints.frozenBytes, which like "
            "does not allow: set all as python -m dltrain.profile prints them, or remove it",
            lambda h: (
                h.largest_unit_parameters is None
                or (h.parameters is not None and h.largest_unit_parameters <= h.parameters + (h.frozen_bytes or 0))
            ),
        ),
        Rule(
            "largestParameterBytes",
            "!has(self.largestParameterBytes) || "
            "(has(self.parameters) && self.largestParameterBytes <= 8 * self.parameters)",
            "largestParameterBytes must not exceed 8 bytes for each of hints.parameters, which like does not allow: "
            "set both as python -m dltrain.profile prints them, or remove it",
            lambda h: (
                h.largest_parameter_bytes is None
                or (h.parameters is not None and h.largest_parameter_bytes <= 8 * h.parameters)
            ),
        ),
    )

    like: Annotated[
        ReferenceModel | None,
        Field(
            description="A known model with about the same cost as yours, instead of figures. Its cost is for samples "
            "of the usual size: images of 224 x 224; sequences of 512 tokens for BERT, 1024 for GPT-2, 4096 for "
            "Llama 2, and 8192 for Llama 3."
        ),
    ] = None
    trained_parameters: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**15,
            description="With like, if the parameters of the known model are frozen: the number of parameters that are "
            "trained in addition, such as those of LoRA. frozenBytes is then the size of the frozen ones (default: "
            "float32).",
        ),
    ] = None
    parameters: Annotated[int | None, Field(ge=1, le=10**15, description="Number of trainable parameters.")] = None
    flops_per_sample: Annotated[
        float | None,
        Field(gt=0, le=10**18, description="Floating-point operations of one forward and backward pass of one sample."),
    ] = None
    activation_bytes_per_sample: Annotated[
        int, Field(ge=0, le=10**18, description="Bytes of activations that one sample needs for the backward pass.")
    ] = 0
    checkpointed_activation_bytes_per_sample: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**18,
            description="Bytes of activations that one sample needs with activation checkpointing of the modules in "
            "t.checkpoint_activations: their inputs, the activations outside of them, and those of the largest of "
            "them. Without this value, activationCheckpointing Always is rejected, and Auto does not use it.",
        ),
    ] = None
    dense_output_bytes_per_sample: Annotated[
        int | None,
        Field(
            ge=0,
            le=10**18,
            description="Bytes of a sample in the model's output, such as its logits. Set it only if the model has "
            "neither convolutions nor recurrent layers: plans for CPUs then need less memory. Unset: plans assume as "
            "much memory as kernels of such layers need.",
        ),
    ] = None
    largest_activation_bytes_per_sample: Annotated[
        int | None,
        Field(
            ge=0,
            le=10**18,
            description="Bytes of a sample in the largest tensor that the forward pass saves. With "
            "denseOutputBytesPerSample and largestParameterBytes, plans for CPUs in the operator's image need less "
            "memory.",
        ),
    ] = None
    largest_parameter_bytes: Annotated[
        int | None,
        Field(ge=1, le=10**16, description="Bytes of the largest trainable tensor, such as an embedding."),
    ] = None
    frozen_bytes: Annotated[
        int | None,
        Field(
            ge=0,
            le=10**16,
            description="Bytes of the parameters that are not trained, such as the pretrained base of LoRA. Plans "
            "count them in the memory of each rank, and twice in main memory, where the script loads them.",
        ),
    ] = None
    largest_unit_parameters: Annotated[
        int | None,
        Field(
            ge=1,
            le=10**15,
            description="Number of parameters, also those that are not trained, of the largest module that ranks "
            "gather at once with parallelism.strategy Sharded: an element of a ModuleList or Sequential, such as a "
            "transformer layer, or all modules outside of them together, such as the embeddings. Unset: plans assume "
            "a quarter of the model.",
        ),
    ] = None
    pairs: Annotated[
        ModelPairs | None,
        Field(description="What strategy Tensor splits. Unset: plans assume half of the model in pairs of 8 units."),
    ] = None


class ModelSpec(ApiModel):
    """The model to train: a built-in model by name, or hints about the model of trainer.command."""

    rules = (
        Rule(
            "name",
            "has(self.name) != has(self.hints)",
            "set exactly one of name (a built-in model) and hints (the size of your own model)",
            lambda m: (m.name is not None) != (m.hints is not None),
        ),
    )

    name: Annotated[BuiltinModel | None, Field(description="A built-in model.")] = None
    hints: Annotated[
        ModelHints | None, Field(description="Size of your own model, for the planner; see trainer.command.")
    ] = None
    sync_batch_norm: Annotated[
        bool,
        Field(
            description="true: BatchNorm layers of a dltrain script normalize over the global batch instead of each "
            "rank's local batch. The built-in models have no BatchNorm layers."
        ),
    ] = False

    @property
    def given(self) -> bool:
        """Return True if the job has a model (``name`` or ``hints``). Jobs with framework Torchrun or MPI need none."""
        return self.name is not None or self.hints is not None

    @property
    def has_blocks(self) -> bool:
        """Return True if the planner knows the memory that the model needs with activation checkpointing."""
        if self.name is not None:
            return self.name.value in BLOCK_MODELS
        if self.hints is None:
            return False
        if self.hints.like is not None:
            return self.hints.like.value not in REFERENCES_WITHOUT_BLOCKS
        return self.hints.checkpointed_activation_bytes_per_sample is not None


NO_MODEL = ModelSpec.model_construct()
"""The model of a job without ``spec.model``. It is not valid in a manifest."""
