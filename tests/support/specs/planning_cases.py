"""Valid and invalid specs: how a job is planned, split, scheduled and stored."""

from support.specs.small_specs import GPT, HINTS, MPI_ONLY, OPTED_IN, TORCHRUN_ONLY, Json

PAIRS = {"count": 1, "units": 2, "parameters": 1, "flopsPerSample": 1, "activationBytesPerSample": 5,
         "reducedBytesPerSample": 1}  # fmt: skip

# Changes to a minimal spec, and a part of the message of the rule that they break ("" for valid specs).
PLANNING: dict[str, tuple[Json, str]] = {
    "Fixed without groups": ({"planning": {"mode": "Fixed"}}, "list the node groups"),
    "groups without Fixed": ({"planning": {"groups": [{"device": "cpu", "nodes": 1}]}}, "list the node groups"),
    "Fixed": ({"planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1}]}}, ""),
    "integers for quantities": (
        {
            "resources": {"cpu": 2, "cpuLimit": 2, "memory": 2**33},
            "trainer": {"scratch": {"size": 2**33}},
            "dataset": {"uri": "s3://a/b.npz", "samples": 9, "size": 2**33},
            "checkpoint": {"volume": {"size": 2**33}},
        },
        "",
    ),
    "integer for the size of staging": ({"checkpoint": {"uri": "s3://bucket/a", "stagingSize": 1}}, ""),
    "planning without mode": ({"planning": {"candidates": 3}}, ""),
    "sharded optimizer": ({"parallelism": {"strategy": "Optimizer"}}, ""),
    "sharded optimizer by a ring": ({"parallelism": {"strategy": "Optimizer"}, "collective": "Ring"}, ""),
    "sharded optimizer by a tree": (
        {"parallelism": {"strategy": "Optimizer"}, "collective": "Tree"}, "needs collective Ring or Torch",
    ),
    "sharded model of a script": (
        {"parallelism": {"strategy": "Sharded", "microBatches": 2}, "trainer": {"command": ["a"]}, "collective": "Torch"}, "",
    ),
    "chosen micro-batches of a sharded model": (
        {"parallelism": {"strategy": "Sharded", "gradientAccumulation": "Auto"}, "trainer": {"command": ["a"]}}, "",
    ),
    "sharded built-in model": ({"parallelism": {"strategy": "Sharded"}}, "Sharded supports training scripts only"),
    "sharded model by a ring": (
        {"parallelism": {"strategy": "Sharded"}, "trainer": {"command": ["a"]}, "collective": "Ring"},
        "Sharded needs collective Torch",
    ),
    "sharded model in bfloat16": (
        {"parallelism": {"strategy": "Sharded"}, "trainer": {"command": ["a"]}, "precision": "BF16"}, "",
    ),
    "sharded model of a torchrun script": (
        {"parallelism": {"strategy": "Sharded"}, "trainer": {"command": ["a"], "framework": "Torchrun"}}, "",
    ),
    "sharded model of a torchrun script without a model": (
        {**TORCHRUN_ONLY, "parallelism": {"strategy": "Sharded"}}, "parallelism.strategy (other than Optimizer",
    ),
    "sharded model of an MPI program": (
        {"parallelism": {"strategy": "Sharded"}, "trainer": {"command": ["a"], "framework": "MPI"}},
        "trainer.framework MPI runs programs",
    ),
    "sharded model in two groups": (
        {
            "parallelism": {"strategy": "Sharded"},
            "trainer": {"command": ["a"]},
            "planning": {"mode": "Fixed", "groups": [{"device": "a", "nodes": 1}, {"device": "b", "nodes": 1}]},
        },
        "Sharded needs one device type",
    ),
    "pipeline": ({"parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 3}}, ""),
    "pipeline without stages": ({"parallelism": {"strategy": "Pipeline"}}, "strategy Pipeline, which needs it"),
    "replicas of a pipeline": ({"parallelism": {"strategy": "Pipeline", "stages": 2, "replicas": 4}}, ""),
    "replicas of parts of layers": ({"parallelism": {"strategy": "Tensor", "replicas": 2}}, ""),
    "replicas with data parallelism": (
        {"parallelism": {"replicas": 2}}, "parallelism.replicas needs parallelism.strategy Pipeline or Tensor",
    ),
    "replicas with Auto": ({"parallelism": {"strategy": "Auto", "replicas": 2}}, "with strategy Auto, the planner chooses"),
    "more replicas than samples": (
        {"parallelism": {"strategy": "Tensor", "replicas": 9}, "globalBatchSize": 8}, "because each replica needs a sample",
    ),
    "stages of nothing": ({"parallelism": {"stages": 2}}, "stages is for parallelism.strategy Pipeline"),
    "micro-batches of nothing": (
        {"parallelism": {"strategy": "Tensor", "microBatches": 2}}, "microBatches needs strategy Data, Optimizer, Sharded or Pipeline",
    ),
    "micro-batches of Auto": (
        {"parallelism": {"strategy": "Auto", "microBatches": 2}}, "microBatches needs strategy Data",
    ),
    "accumulated gradients": ({"parallelism": {"strategy": "Optimizer", "microBatches": 2}}, ""),
    "accumulation with Auto": ({"parallelism": {"strategy": "Auto", "gradientAccumulation": "Auto"}}, ""),
    "accumulated gradients of a script": ({**OPTED_IN, "trainer": {"command": ["a"]}}, ""),
    "accumulation in a pipeline": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2, "gradientAccumulation": "Auto"}}, "remove gradientAccum",
    ),
    "a fixed number of chosen micro-batches": (
        {"parallelism": {"microBatches": 2, "gradientAccumulation": "Auto"}}, "remove one of the two",
    ),
    "asynchronous accumulation": (
        {"parallelism": {"synchronization": "Asynchronous", "gradientAccumulation": "Auto"}},
        "needs synchronization Synchronous",
    ),
    "automatic precision": ({"precision": "Auto"}, ""),
    "automatic precision of a pipeline": ({"precision": "Auto", "parallelism": {"strategy": "Tensor"}}, ""),
    "bfloat16": ({"precision": "BF16", "parallelism": {"strategy": "Optimizer"}, "collective": "Ring"}, ""),
    "bfloat16 of a script": ({"precision": "BF16", "trainer": {"command": ["a"]}}, ""),
    "bfloat16 in parts": ({"precision": "BF16", "parallelism": {"strategy": "Tensor"}}, "need parallelism.strategy Data"),
    "asynchronous float16": (
        {"precision": "FP16", "parallelism": {"synchronization": "Asynchronous"}}, "parallelism.synchronization Synchr",
    ),
    "bfloat16 with a layered server": ({"precision": "BF16", "collective": "LayeredServer"}, "other than LayeredServer"),
    "precision of a torchrun script": ({**TORCHRUN_ONLY, "precision": "FP32"}, "precision needs trainer.framework DLT"),
    "precision that a torchrun script has": (
        {"precision": "BF16", "trainer": {"command": ["a"], "framework": "Torchrun"}}, "",
    ),
    "automatic precision of a torchrun script": (
        {"precision": "Auto", "trainer": {"command": ["a"], "framework": "Torchrun"}}, "set precision to FP32, BF16 or",
    ),
    "precision of an MPI program": (
        {"precision": "BF16", "trainer": {"command": ["a"], "framework": "MPI"}}, "precision needs trainer.framework",
    ),
    "automatic precision of an MPI program": ({**MPI_ONLY, "precision": "Auto"}, "precision needs trainer.framework DLT"),
    "float16 with a range test": (
        {"precision": "FP16", "optimizer": {"findLearningRate": True}}, "precision FP16 scales losses",
    ),
    "search by the accuracy": ({"optimizer": {"findLearningRate": True, "learningRateCurve": "Accuracy"}}, ""),
    "curve without a search": (
        {"optimizer": {"learningRateCurve": "Loss"}}, "learningRateCurve is the curve of the learning-rate range test",
    ),
    "bfloat16 with a range test": ({"precision": "BF16", "optimizer": {"findLearningRate": True}}, ""),
    "deferred initialization": (
        {"model": {"hints": HINTS}, "trainer": {"command": ["a"]},
         "parallelism": {"strategy": "Sharded", "deferredInit": True}}, "",
    ),
    "deferred initialization of whole models": (
        {"model": {"hints": HINTS}, "trainer": {"command": ["a"]}, "parallelism": {"deferredInit": True}}, "deferredInit is for parallelism.strategy Sharded",
    ),
    "automatic activation checkpointing": ({"activationCheckpointing": "Auto"}, ""),
    "automatic activation checkpointing of a pipeline": (
        {"activationCheckpointing": "Auto", "parallelism": {"strategy": "Tensor"}}, "",
    ),
    "activation checkpointing": ({**GPT, "activationCheckpointing": "Always", "parallelism": {"strategy": "Auto"}}, ""),
    "activation checkpointing without blocks": ({"activationCheckpointing": "Always"}, "needs a model with blocks: choo"),
    "activation checkpointing without hints": (
        {"activationCheckpointing": "Always", "model": {"hints": HINTS}, "trainer": {"command": ["a"]}},
        "set model.hints.checkpointedActivationBytesPerSample",
    ),
    "activation checkpointing of a script": (
        {
            "activationCheckpointing": "Always", "trainer": {"command": ["a"]},
            "model": {"hints": {**HINTS, "activationBytesPerSample": 9, "checkpointedActivationBytesPerSample": 3}},
        }, "",
    ),
    "activation checkpointing like GPT-2": (
        {"activationCheckpointing": "Always", "model": {"hints": {"like": "GPT-2"}}, "trainer": {"command": ["a"]}}, "",
    ),
    "activation checkpointing like VGG-16": (
        {"activationCheckpointing": "Always", "model": {"hints": {"like": "VGG-16"}}, "trainer": {"command": ["a"]}},
        "needs a model with blocks",
    ),
    "more bytes with activation checkpointing": (
        {"model": {"hints": {**HINTS, "checkpointedActivationBytesPerSample": 3}}, "trainer": {"command": ["a"]}},
        "must not exceed activationBytesPerSample",
    ),
    "bytes with activation checkpointing like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "checkpointedActivationBytesPerSample": 3}}, "trainer": {"command": ["a"]}},
        "must not exceed activationBytesPerSample",
    ),
    "hints of pairs": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "denseOutputBytesPerSample": 0, "pairs": PAIRS}},
         "trainer": {"command": ["a"]}}, "",
    ),
    "more activations in pairs than in all": (
        {"model": {"hints": {**HINTS, "pairs": PAIRS}}, "trainer": {"command": ["a"]}}, "must not exceed those of the whole",
    ),
    "more parameters in pairs than in all": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "pairs": {**PAIRS, "parameters": 10**12}}},
         "trainer": {"command": ["a"]}}, "must not exceed those of the whole",
    ),
    "pairs like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "pairs": PAIRS}}, "trainer": {"command": ["a"]}}, "which like does not allow",
    ),
    "output like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "denseOutputBytesPerSample": 5}}, "trainer": {"command": ["a"]}},
        "the layers of hints.like are known",
    ),
    "a larger parameter than all together": (
        {"model": {"hints": {**HINTS, "largestParameterBytes": 9}}, "trainer": {"command": ["a"]}},
        "must not exceed 8 bytes for each of hints.parameters",
    ),
    "a larger unit than the model": (
        {"model": {"hints": {**HINTS, "frozenBytes": 2, "largestUnitParameters": 4}}, "trainer": {"command": ["a"]}},
        "largestUnitParameters must not exceed hints.parameters",
    ),
    "a unit with frozen parameters": (
        {"model": {"hints": {**HINTS, "frozenBytes": 8, "largestUnitParameters": 3}}, "trainer": {"command": ["a"]}}, "",
    ),
    "largest unit like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "largestUnitParameters": 5}}, "trainer": {"command": ["a"]}},
        "which like does not allow",
    ),
    "frozen parameters": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "frozenBytes": 8,
                             "pairs": {**PAIRS, "parameters": 0, "frozenBytes": 8}}}, "trainer": {"command": ["a"]}}, "",
    ),
    "frozen parameters like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "frozenBytes": 5}}, "trainer": {"command": ["a"]}},
        "set hints.trainedParameters, or remove hints.frozenBytes",
    ),
    "adapters on a model like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "trainedParameters": 5, "frozenBytes": 5}}, "trainer": {"command": ["a"]}},
        "",
    ),
    "trained parameters without a known model": (
        {"model": {"hints": {**HINTS, "trainedParameters": 5}}, "trainer": {"command": ["a"]}},
        "hints.trainedParameters is for hints.like",
    ),
    "more frozen bytes in pairs than in all": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "frozenBytes": 8, "pairs": {**PAIRS, "frozenBytes": 9}}},
         "trainer": {"command": ["a"]}},
        "must not exceed those of the whole",
    ),
    "frozen bytes in pairs alone": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "pairs": {**PAIRS, "frozenBytes": 9}}},
         "trainer": {"command": ["a"]}},
        "must not exceed those of the whole",
    ),
    "a larger activation than all together": (
        {"model": {"hints": {**HINTS, "activationBytesPerSample": 9, "largestActivationBytesPerSample": 10}},
         "trainer": {"command": ["a"]}},
        "must not exceed activationBytesPerSample",
    ),
    "largest parameter like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "largestParameterBytes": 5}}, "trainer": {"command": ["a"]}},
        "which like does not allow",
    ),
    "activation checkpointing in parts": (
        {**GPT, "activationCheckpointing": "Always", "parallelism": {"strategy": "Tensor"}}, "Always needs parallelism.str",
    ),
    "asynchronous activation checkpointing": (
        {**GPT, "activationCheckpointing": "Always", "parallelism": {"synchronization": "Asynchronous"}},
        "activationCheckpointing Always needs parallelism.strategy",
    ),
    "activation checkpointing with a layered server": (
        {**GPT, "activationCheckpointing": "Always", "collective": "LayeredServer"}, "other than LayeredServer",
    ),
    "activation checkpointing of a torchrun script": (
        {**TORCHRUN_ONLY, "activationCheckpointing": "Never"}, "activationCheckpointing needs trainer.framework DLTrain",
    ),
    "activation checkpointing that a torchrun script has": (
        {"activationCheckpointing": "Never", "trainer": {"command": ["a"], "framework": "Torchrun"}}, "",
    ),
    "automatic activation checkpointing of a torchrun script": (
        {"activationCheckpointing": "Auto", "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "set activationCheckpointing to Always or Never",
    ),
    "more micro-batches than samples": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 99}, "globalBatchSize": 9},
        "microBatches must not exceed globalBatchSize",
    ),
    "tensor": ({"parallelism": {"strategy": "Tensor"}, "collective": "Tree"}, ""),
    "tensor without pairs": (
        {"parallelism": {"strategy": "Tensor"}, "model": {"name": "resnet18"}}, "pairs of linear layers: choose mlp",
    ),
    "pipeline of a script": ({"parallelism": {"strategy": "Pipeline", "stages": 2}, "trainer": {"command": ["a"]}}, ""),
    "tensor of a script": ({"parallelism": {"strategy": "Tensor", "replicas": 2}, "trainer": {"command": ["a"]}}, ""),
    "a part of a program": (
        {"parallelism": {"strategy": "Tensor"}, "trainer": {"command": ["a"], "framework": "Torchrun"}}, "orchrun",
    ),
    "pipeline by a ring": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2}, "collective": "Ring"}, "collective must be Auto",
    ),
    "tensor by a server": (
        {"parallelism": {"strategy": "Tensor"}, "collective": "ParameterServer"}, "must not be DDP or ParameterServer with Tensor",
    ),
    "pipeline on a group": (
        {
            "parallelism": {"strategy": "Pipeline", "stages": 2},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2}]},
        },
        "",
    ),
    "uneven pipeline": (
        {
            "parallelism": {"strategy": "Pipeline", "stages": 2},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2, "batchPerRank": 1}]},
        },
        "one group without batchPerRank",
    ),
    "search for a part": (
        {"parallelism": {"strategy": "Tensor"}, "optimizer": {"findLearningRate": True}},
        "findLearningRate needs parallelism.strategy Data or Optimizer",
    ),
    "layered server": ({"collective": "LayeredServer", "parallelism": {"strategy": "Auto"}}, ""),
    "layered server of a program": (
        {"collective": "LayeredServer", "trainer": {"command": ["a"]}}, "LayeredServer supports built-in models only",
    ),
    "layered server, asynchronous": (
        {"collective": "LayeredServer", "parallelism": {"synchronization": "Asynchronous"}}, "need collective ParameterServer",
    ),
    "layered server of a sharded optimizer": (
        {"collective": "LayeredServer", "parallelism": {"strategy": "Optimizer"}}, "Optimizer needs collective Ring or Torch",
    ),
    "layered server of a tensor": (
        {"collective": "LayeredServer", "parallelism": {"strategy": "Tensor"}}, "collective must be Auto with",
    ),
    "layered server and a search": (
        {"collective": "LayeredServer", "optimizer": {"findLearningRate": True}},
        "LayeredServer gives workers no gradient of the whole batch",
    ),
    "layered server and measured scaling": (
        {"collective": "LayeredServer", "optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}}},
        "LayeredServer gives workers no gradient of the whole batch",
    ),
    "DDP": ({"collective": "DDP", "precision": "BF16"}, ""),
    "DDP of a sharded optimizer": (
        {"collective": "DDP", "parallelism": {"strategy": "Optimizer"}}, "Optimizer needs collective Ring or Torch",
    ),
    "DDP of a tensor": (
        {"collective": "DDP", "parallelism": {"strategy": "Tensor"}}, "must not be DDP or ParameterServer with Tensor",
    ),
    "DDP, asynchronous": (
        {"collective": "DDP", "parallelism": {"synchronization": "Asynchronous"}}, "need collective ParameterServer",
    ),
    "DDP of a torchrun script": (
        {"collective": "DDP", "trainer": {"command": ["a"], "framework": "Torchrun"}}, "orchrun",
    ),
    "compressed gradients, asynchronous": (
        {"gradientCompression": "BF16", "parallelism": {"synchronization": "Asynchronous"}},
        "gradientCompression has its own all-reduce",
    ),
    "compressed gradients": ({"gradientCompression": "BF16"}, ""),
    "compressed gradients, a collective": (
        {"gradientCompression": "FP16", "collective": "Ring"}, "gradientCompression has its own all-reduce",
    ),
    "asynchronous": ({"parallelism": {"synchronization": "Asynchronous"}, "collective": "ParameterServer"}, ""),
    "within a bound": ({"parallelism": {"synchronization": "StaleSynchronous", "stalenessBound": 3}}, ""),
    "no bound": ({"parallelism": {"synchronization": "StaleSynchronous"}}, "StaleSynchronous, which needs it"),
    "bound of nothing": ({"parallelism": {"stalenessBound": 3}}, "stalenessBound is for parallelism.synchronization StaleSynchronous"),
    "asynchronous parts": (
        {"parallelism": {"synchronization": "Asynchronous", "strategy": "Tensor"}}, "need strategy Data",
    ),
    "asynchronous ring": (
        {"parallelism": {"synchronization": "Asynchronous"}, "collective": "Ring"}, "need collective ParameterServer",
    ),
    "asynchronous program": (
        {"parallelism": {"synchronization": "Asynchronous"}, "trainer": {"command": ["a"]}},
        "StaleSynchronous support built-in models only",
    ),
    "asynchronous search": (
        {"parallelism": {"synchronization": "Asynchronous"}, "optimizer": {"findLearningRate": True}},
        "need the gradient of the whole batch",
    ),
    "measured scaling": ({"optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}}}, ""),
    "measured scaling of a sharded optimizer": (
        {
            "optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}},
            "parallelism": {"strategy": "Optimizer"},
        },
        "needs parallelism.strategy Data",
    ),
    "search": ({"optimizer": {"findLearningRate": True}}, ""),
    "search and scaling": (
        {"optimizer": {"findLearningRate": True, "learningRateScaling": {"rule": "Linear", "baseBatchSize": 4}}},
        "remove learningRateScaling",
    ),
    "search for a program": (
        {"optimizer": {"findLearningRate": True}, "trainer": {"command": ["a"]}}, "findLearningRate supports built-in models only",
    ),
    "claim and class": (
        {"checkpoint": {"volume": {"claimName": "a", "storageClassName": "b"}}}, "no effect on an existing claim",
    ),
    "shared claim": ({"checkpoint": {"volume": {"shared": True, "storageClassName": "b"}}}, ""),
    "claim name and a shared claim": (
        {"checkpoint": {"volume": {"claimName": "a", "shared": False}}}, "shared has no effect on an existing claim",
    ),
    "claim": ({"checkpoint": {"volume": {"claimName": "a"}}}, ""),
    "checkpoints in an object store": (
        {"checkpoint": {"uri": "s3://models.example/team-a/digits/", "secretName": "s3", "stagingSize": "9Gi"}}, "",
    ),
    "checkpoints in a bucket": ({"checkpoint": {"uri": "s3://models", "stagingSize": "Auto", "keep": 5}}, ""),
    "checkpoints in an object store, with a size": ({"checkpoint": {"uri": "s3://a-1", "volume": {"size": "2Gi"}}}, ""),
    "checkpoints at another scheme": ({"checkpoint": {"uri": "gs://models/a"}}, "other schemes"),
    "checkpoints without a bucket": ({"checkpoint": {"uri": "s3:///a"}}, "uri must name a bucket"),
    "checkpoints in a bucket with capitals": ({"checkpoint": {"uri": "s3://Models/a"}}, "uri must name a bucket"),
    "checkpoints with a query": ({"checkpoint": {"uri": "s3://models/a?b"}}, "other characters"),
    "checkpoints with a quote": ({"checkpoint": {"uri": "s3://models/a\"b"}}, "other characters"),
    "checkpoints with an empty folder": ({"checkpoint": {"uri": "s3://models//a"}}, "uri must name a bucket"),
    "object store and claim": (
        {"checkpoint": {"uri": "s3://models", "volume": {"claimName": "a"}}}, "need no claim: remove uri",
    ),
    "object store and storage class": (
        {"checkpoint": {"uri": "s3://models", "volume": {"storageClassName": "a"}}}, "need no claim: remove uri",
    ),
    "object store and shared claim": (
        {"checkpoint": {"uri": "s3://models", "volume": {"shared": True}}}, "need no claim: remove uri",
    ),
    "credentials without an object store": (
        {"checkpoint": {"secretName": "a"}}, "secretName is for checkpoints in an object store: set uri",
    ),
    "staging without an object store": ({"checkpoint": {"stagingSize": "1Gi"}}, "set uri, or remove stagingSize"),
    "staging without space": ({"checkpoint": {"uri": "s3://models", "stagingSize": "0Gi"}}, "must be more than 0"),
}  # fmt: skip
