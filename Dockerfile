# varjax on an NVIDIA GPU. The CUDA libraries come with the wheels; the host needs the driver alone.
#     docker build -t varjax .
#     docker run --gpus all -v $PWD/results:/pictures/results varjax run --policy=headkv --budget=0.25
FROM python:3.12-slim
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir '.[gpu,eval,port,text]'
WORKDIR /pictures
ENTRYPOINT ["varjax"]
CMD ["--help"]
