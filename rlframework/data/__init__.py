"""From data sets to microbatches.

- data sets: `sources` (rows from files and the hub), `conversations` (rows to messages), `chat` and `turns` (messages
  to token ids and masks), `tokens` (rendered once, memory-mapped), `loader` (batches that resume), `collate`
  (padding), `tokenizer`, `models`, `hub`;
- reward data: `reward_data`, `preferences`, `judged_solutions`, saved by `memmap`;
- microbatches: `packing` (which rows go together), `microbatches` (the default data processor), `model_inputs` and
  `processing` (what the model gets), `global_batch` (counts), `packed_tensor` (media), `ranks`, `tensor_parcel`.
"""
