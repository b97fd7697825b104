"""Checkpoints on disk: portable (whole tensors), sharded (torch's DCP), native (the engine's own), adapters.

    weights_path/                    config.json and tokenizer, as in a Hugging Face directory
        checksums.json               sizes and checksums of all files
        model*.safetensors           portable: fp32 weights named as by `save_pretrained`
        __RANK_0.distcp, .metadata   sharded: each worker's shards of them; offset and file of each shard
        engine/, native.json         native: files of `Engine.save_native`; the backend that wrote them
    optimizer_path/
        training.json                optimizer steps by weight, calls of the schedule, versions
        random.safetensors           random states of the workers, `cpu.RANK` and `cuda.RANK`
        model*.safetensors           portable: AdamW's moments, `exp_avg.NAME` and `exp_avg_sq.NAME`, whole, fp32
        __RANK_0.distcp, .metadata   sharded: shards of them
        checksums.json

The portable and the sharded form are the same for every backend and layout; only the backend that wrote a native
checkpoint can resume from it. The first two are read without unpickling anything that could run code. A directory
without checksums, as written by other programs, is read unchecked. Sharded and native directories need a file system
that all machines share. Random states are restored if the number of workers is the same.
"""
