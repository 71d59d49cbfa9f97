// Whether modules are unchanged: an asynchronous save asks this in its call, for hundreds of
// modules.
//
// What was seen before is kept in Python lists and tuples, where the garbage collector can see it.
// Only addresses are compared: an object in a list is alive, so no other object has its address.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

namespace py = pybind11;

namespace {

// Whether each dict has the same entries as before, in their order. `entries` are the keys and
// values of all dicts; Ellipsis stands for any value but None. `sizes` are 32-bit counts.
bool same_entries(const py::list& dicts, const py::bytes& sizes, const py::tuple& entries) {
    const char* packed = PyBytes_AS_STRING(sizes.ptr());
    const Py_ssize_t count = PyList_GET_SIZE(dicts.ptr()), all = PyTuple_GET_SIZE(entries.ptr());
    if (PyBytes_GET_SIZE(sizes.ptr()) != count * static_cast<Py_ssize_t>(sizeof(std::uint32_t))) {
        throw py::value_error("a size for each dict");
    }
    Py_ssize_t next = 0;
    for (Py_ssize_t i = 0; i != count; ++i) {
        PyObject* const dict = PyList_GET_ITEM(dicts.ptr(), i);
        std::uint32_t size;
        std::memcpy(&size, packed + static_cast<std::size_t>(i) * sizeof(size), sizeof(size));
        if (PyDict_Size(dict) != static_cast<Py_ssize_t>(size)) {
            PyErr_Clear();  // it is not a dict any more
            return false;
        }
        if (size == 0) continue;
        if (next + 2 * static_cast<Py_ssize_t>(size) > all) throw py::value_error("entries");
        Py_ssize_t at = 0;
        PyObject *key, *value;  // borrowed; nothing runs that could change the dict
        while (PyDict_Next(dict, &at, &key, &value)) {
            PyObject* const had = PyTuple_GET_ITEM(entries.ptr(), next + 1);
            const bool is_same = had == Py_Ellipsis ? value != Py_None : value == had;
            if (!is_same || key != PyTuple_GET_ITEM(entries.ptr(), next)) return false;
            next += 2;
        }
    }
    return next == all;
}

// Whether each object has the same type as before, and no attribute of that name.
bool same_types(const py::list& objects, const py::tuple& types, const py::list& attributes,
                const py::str& absent) {
    const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
    if (PyTuple_GET_SIZE(types.ptr()) != count || PyList_GET_SIZE(attributes.ptr()) != count) {
        throw py::value_error("a type and attributes for each object");
    }
    for (Py_ssize_t i = 0; i != count; ++i) {
        const PyTypeObject* type = Py_TYPE(PyList_GET_ITEM(objects.ptr(), i));
        if (reinterpret_cast<const PyObject*>(type) != PyTuple_GET_ITEM(types.ptr(), i)) {
            return false;
        }
        const int has = PyDict_Contains(PyList_GET_ITEM(attributes.ptr(), i), absent.ptr());
        if (has < 0) throw py::error_already_set();
        if (has != 0) return false;
    }
    return true;
}

// Whether an attribute of each object is the same object as before.
bool same_attributes(const py::list& objects, const py::str& name, const py::tuple& had) {
    const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
    if (PyTuple_GET_SIZE(had.ptr()) != count) throw py::value_error("a value for each object");
    for (Py_ssize_t i = 0; i != count; ++i) {
        PyObject* const value = PyObject_GetAttr(PyList_GET_ITEM(objects.ptr(), i), name.ptr());
        if (value == nullptr) throw py::error_already_set();
        Py_DECREF(value);  // the address alone is compared
        if (value != PyTuple_GET_ITEM(had.ptr(), i)) return false;
    }
    return true;
}

// Whether each set has the same elements as before.
bool same_sets(const py::list& sets, const py::tuple& had) {
    const Py_ssize_t count = PyList_GET_SIZE(sets.ptr());
    if (PyTuple_GET_SIZE(had.ptr()) != count) throw py::value_error("a set for each");
    for (Py_ssize_t i = 0; i != count; ++i) {
        PyObject* const now = PyList_GET_ITEM(sets.ptr(), i);
        PyObject* const then = PyTuple_GET_ITEM(had.ptr(), i);
        const Py_ssize_t size = PySet_Size(now);
        if (size < 0) throw py::error_already_set();
        if (size != PySet_Size(then)) return false;
        if (size == 0) continue;
        const int is_same = PyObject_RichCompareBool(now, then, Py_EQ);
        if (is_same < 0) throw py::error_already_set();
        if (is_same == 0) return false;
    }
    return true;
}

}  // namespace

void bind_modules(py::module_& m) {
    m.def("same_entries", &same_entries, py::arg("dicts"), py::arg("sizes"), py::arg("entries"));
    m.def("same_types", &same_types, py::arg("objects"), py::arg("types"), py::arg("attributes"),
          py::arg("absent"));
    m.def("same_attributes", &same_attributes, py::arg("objects"), py::arg("name"), py::arg("had"));
    m.def("same_sets", &same_sets, py::arg("sets"), py::arg("had"));
}
