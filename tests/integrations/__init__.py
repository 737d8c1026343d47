from pathlib import Path

task_worker_path = Path(__file__).parent / "task_worker.py"
