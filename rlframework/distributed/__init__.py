"""Batches, process meshes and worker groups: how rows and calls get to the workers, and results back.

Rows            batched_data_dict, on batch_rows; sharding (plans), microbatch_views
Ranks           named_sharding (who stands where), collectives, rendezvous and ports (how a process group forms)
Worker groups   of the configuration: inline, processes (process_peer), ray_group (ray_host)
                what they share: dispatching on dispatch (who gets what), hosted on worker_host, failures
                NeMo-RL's, from Python: virtual_cluster (placement), worker_builder (worker_class, worker_actor,
                worker_handle), worker_groups (actor_group)
Under them      machine (cores, environment), ray_runtime (one Ray), transport and private_memory (without a copy)
"""
