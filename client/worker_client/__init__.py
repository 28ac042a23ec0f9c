"""The driver's side. Applications begin with driver.py or async_driver.py, worker_group.py,
requests.py, scheduler/ and launcher.py; each folder's first lines say what it has. Never imports
torch, trainer/ and vllm/hooks/ apart."""
