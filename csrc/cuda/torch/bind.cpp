// The module fastrl._C_cuda: importing it loads this library, which registers the operators.
#include <Python.h>
#include <cuda_runtime_api.h>

PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* created = PyModule_Create(&module);
  if (created != nullptr) PyModule_AddIntConstant(created, "CUDART_VERSION", CUDART_VERSION);
  return created;
}
